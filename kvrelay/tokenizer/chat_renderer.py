"""The process that renders chat templates. Templates are untrusted code from a model folder.

`chat_template.py` runs this file. Each request on stdin is a line {"call", "template", "variables",
"messages", "tools", "template_kwargs", "lengths", "cpu_s", "timeout_s"}. The texts follow it, with
these lengths in bytes. In the messages, a number stands for the text at this place; `tools` and
`template_kwargs` are such numbers, or null. The process first writes {"ready": true} to stdout.
Then it writes for each request a line {"call", "error"}, or a line {"call", "length"} followed by a
text of that many bytes; `call` is that of the request. It exits when stdin ends, and SIGPROF ends
it when a request has taken `cpu_s` of processor time.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from importlib.util import find_spec
from types import ModuleType
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
    render_jinja_template = _renderer()

    def render(request: dict[str, Any], texts: list[str]) -> str:
        given = {
            name: None if request[name] is None else json.loads(texts[request[name]])
            for name in ("tools", "template_kwargs")
        }
        rendered, _ = render_jinja_template(
            [[_message(one, texts) for one in request["messages"]]],
            chat_template=request["template"],
            tools=given["tools"],
            add_generation_prompt=True,
            **(given["template_kwargs"] or {}) | request["variables"],
        )
        return str(rendered[0])

    _limit_resources()
    _send(replies, {"ready": True})
    for line in requests:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        # SIGALRM ends the process.
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + GRACE_S)
        texts = [
            requests.read(length).decode(errors="surrogatepass") for length in request["lengths"]
        ]
        text = b""
        try:
            # The arguments of a call may have escaped halves of characters, which are no text.
            text = render(request, texts).encode(errors="replace")
            reply: dict[str, object] = {"call": request["call"], "length": len(text)}
        except Exception as error:  # noqa: BLE001 - whatever a template raises is the answer
            said = (str(error) or type(error).__name__)[:MAX_ERROR]
            reply = {"call": request["call"], "error": said}
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(replies, reply, text)


def _message(places: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    """Returns the message as templates expect it: the arguments of calls are objects."""
    message = {
        name: None if place is None else texts[place]
        for name, place in places.items()
        if name != "tool_calls"
    }
    calls = [{name: texts[place] for name, place in one.items()} for one in places["tool_calls"]]
    if calls:
        message["tool_calls"] = [
            {
                "id": one["id"],
                "type": "function",
                "function": {"name": one["name"], "arguments": _arguments(one["arguments"])},
            }
            for one in calls
        ]
    return message


def _arguments(text: str) -> Any:
    """Returns the value of the JSON text, or the text itself if the model wrote it wrong."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _private_stdout() -> BinaryIO:
    """Returns the stdout of the process. From now on, prints of libraries go to stderr."""
    private = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return private


def _renderer() -> Any:
    """Returns transformers' function, imported without torch and without the packages around its
    module: their imports, an HTTP client among them, take most of the time and memory.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    found = find_spec("transformers")
    places = (found and found.submodule_search_locations) or []
    for name, folders in {
        "transformers": list(places),
        "transformers.utils": [os.path.join(one, "utils") for one in places],
    }.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = folders
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except (ImportError, AttributeError):
        # Another version of transformers, whose module needs its packages.
        for name in [one for one in sys.modules if one.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        from transformers.utils.chat_template_utils import render_jinja_template
    return render_jinja_template


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
