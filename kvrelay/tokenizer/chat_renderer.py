"""The process that renders chat templates. Templates are untrusted code from a model folder.

`chat_template.py` runs this file. Each request on stdin is a line {"template", "variables",
"lengths", "timeout_s"}. The texts follow it: role and content of each message, with these lengths
in bytes. The process first writes {"ready": true} to stdout. Then it writes for each request a line
{"error"}, or a line {"length"} followed by a text of that many bytes. It exits when stdin ends.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

# Most memory that a template may take.
MEMORY_BYTES = 512 * 2**20
# Characters.
MAX_ERROR = 1000
# The parent's timeout is shorter; this one is for a process whose parent is gone.
GRACE_S = 1.0


def main() -> None:
    """Renders the requests on stdin until it ends."""
    requests, replies = sys.stdin.buffer, _private_stdout()
    # Rendering does not need torch, and the process starts ten times faster without it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(request: dict[str, Any], messages: list[dict[str, str]]) -> str:
        texts, _ = render_jinja_template(
            [messages],
            chat_template=request["template"],
            add_generation_prompt=True,
            **request["variables"],
        )
        return str(texts[0])

    _limit_resources()
    _send(replies, {"ready": True})
    for line in requests:
        request = json.loads(line)
        # SIGALRM ends the process.
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + GRACE_S)
        read = [
            requests.read(length).decode(errors="surrogatepass") for length in request["lengths"]
        ]
        messages = [
            {"role": role, "content": content}
            for role, content in zip(read[::2], read[1::2], strict=True)
        ]
        text = b""
        try:
            text = render(request, messages).encode(errors="surrogatepass")
            reply: dict[str, object] = {"length": len(text)}
        except Exception as error:  # noqa: BLE001 - whatever a template raises is the answer
            reply = {"error": (str(error) or type(error).__name__)[:MAX_ERROR]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(replies, reply, text)


def _private_stdout() -> BinaryIO:
    """Returns the stdout of the process. From now on, prints of libraries go to stderr."""
    private = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return private


def _limit_resources() -> None:
    """Limits the memory and forbids writing files. Called after the imports, which map much memory
    that they do not use.
    """
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, mapped + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _send(replies: BinaryIO, reply: dict[str, Any], text: bytes = b"") -> None:
    replies.write(json.dumps(reply).encode() + b"\n" + text)
    replies.flush()


if __name__ == "__main__":
    main()
