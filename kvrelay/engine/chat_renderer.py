"""The process that renders chat templates, which are code from a model folder and not to be trusted.

`chat.py` runs this file. One JSON object a line: on stdin {"template", "variables", "messages", "timeout_s"}, on stdout
first {"ready": true}, then for each request {"text"} or {"error"}. It ends with its stdin.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any, TextIO

MEMORY_BYTES = 512 * 2**20  # that a template may take
MAX_ERROR = 1000  # characters
GRACE_S = 1.0  # the parent kills first; this is for a parent that is gone


def main() -> None:
    requests, replies = sys.stdin, _private_stdout()
    sys.modules["torch"] = None  # type: ignore[assignment]  # rendering needs none, and starts ten times faster
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(request: dict[str, Any]) -> str:
        texts, _ = render_jinja_template(
            [request["messages"]],
            chat_template=request["template"],
            add_generation_prompt=True,
            **request["variables"],
        )
        return str(texts[0])

    _limit_resources()
    _send(replies, {"ready": True})
    for line in requests:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + GRACE_S)  # SIGALRM ends the process
        try:
            reply = {"text": render(request)}
        except Exception as error:  # noqa: BLE001 - whatever a template raises is the answer
            reply = {"error": (str(error) or type(error).__name__)[:MAX_ERROR]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(replies, reply)


def _private_stdout() -> TextIO:
    """The stdout of the process; prints of libraries go to stderr from now on."""
    private = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    return private


def _limit_resources() -> None:
    """Bounded memory, no writing of files. Called after the imports, which map much memory that they do not use."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, mapped + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _send(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
