"""Converts conversations to prompts with the chat template of the model folder."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvrelay.errors import DeadlineExceeded, InvalidArgument, ModelRefused, NotFound, Unavailable
from kvrelay.models.model_json import read_model_json
from kvrelay.process.child import send_signal
from kvrelay.types.chat import WITHOUT_TOOLS, ChatMessage, ChatOptions

_RENDERER = Path(__file__).with_name("chat_renderer.py")
_START_S = 60.0
_MAX_REPLY_BYTES = 16 * 2**20
# Time of a call as a multiple of the processor time that it may take: the machine may be busy.
_TIMES_CPU = 10
# Most bytes of a reply that are read at once.
_READ_BYTES = 2**20
_ENVIRONMENT = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class ChatTemplate:
    """Renders in a separate child process, one conversation at a time.

    A template is code from the model folder. It runs in the sandbox of transformers, in a process
    that starts on first use. A process that exceeds its time, or whose call is cancelled, is killed
    and replaced. A call whose process ends otherwise, for example because the machine has no memory
    left, is repeated once.
    """

    def __init__(self, template: str, variables: Mapping[str, str]) -> None:
        self._template = template
        # For example bos_token.
        self._variables = dict(variables)
        # OpenAI's name for the system role. Few templates know it.
        self._roles = {} if "developer" in template else {"developer": "system"}
        self._turn = asyncio.Lock()
        self._calls = 0
        self._process: asyncio.subprocess.Process | None = None
        self._closed = False

    @classmethod
    def load(cls, model_folder: str | Path) -> ChatTemplate:
        """Loads the template of a model folder. Raises NotFound if the folder has no chat template,
        and ModelRefused if its files cannot be read.
        """
        folder = Path(model_folder)
        described = folder / "tokenizer_config.json"
        config = read_model_json(described) if described.is_file() else {}
        template = _read(folder / "chat_template.jinja") or _template_of(
            config.get("chat_template")
        )
        if template is None:
            raise NotFound(
                f"the model in {folder} has no chat template; send a prompt instead of messages",
                field="model",
            )
        tokens = {name: _token_text(config.get(name)) for name in _TOKEN_NAMES}
        return cls(template, {name: text for name, text in tokens.items() if text is not None})

    @property
    def source(self) -> str:
        """The text of the template."""
        return self._template

    async def render(
        self,
        messages: Sequence[ChatMessage],
        options: ChatOptions = WITHOUT_TOOLS,
        cpu_s: float = 2.0,
    ) -> str:
        """Returns the prompt for a conversation, up to the beginning of the answer.

        The prompt contains the special tokens, so encode it without adding any. Raises
        InvalidArgument with the template's message when the template rejects the messages,
        DeadlineExceeded after `cpu_s` of processor time or ten times that time, and Unavailable
        when the process does not start or this object is closed.
        """
        if not messages:
            raise InvalidArgument("messages is empty; send at least one", field="messages")
        texts = _Texts()
        self._calls += 1
        request = {
            "call": self._calls,
            "template": self._template,
            "variables": self._variables,
            "messages": [
                _places(one, self._roles.get(one.role, one.role), texts) for one in messages
            ],
            "tools": texts.add(options.tools or None),
            "template_kwargs": texts.add(options.template_kwargs or None),
            "lengths": list(map(len, texts.encoded)),
            "cpu_s": cpu_s,
            "timeout_s": cpu_s * _TIMES_CPU,
        }
        async with self._turn:
            try:
                reply = await self._reply(request, texts.encoded)
            except DeadlineExceeded:
                await self._end()
                # Whoever needs a new process waits for it, not the next caller.
                with contextlib.suppress(Unavailable):
                    await self._started()
                raise
            except BaseException:
                # The pipe may still contain the answer to this call.
                await self._end()
                raise
        if "text" not in reply:
            raise InvalidArgument(
                f"the chat template of the model rejects these messages: {reply['error']}",
                field="messages",
            )
        return reply["text"]

    async def aclose(self) -> None:
        """Ends the process. A call in progress fails with Unavailable."""
        self._closed = True
        if self._process is not None:
            send_signal(self._process, signal.SIGKILL)
        async with self._turn:
            await self._end()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._closed:
            raise Unavailable(
                "the chat template renderer is closed, because the router is shutting down"
            )
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self._end()
        try:
            return await self._start()
        except BaseException:
            # The next call would take the line that is still to come for its answer.
            await self._end()
            raise

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", str(_RENDERER)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_READ_BYTES,
                env={**os.environ, **_ENVIRONMENT},
                # Ctrl-C at the terminal is for the parent.
                start_new_session=True,
            )
            async with asyncio.timeout(_START_S):
                ready = await _line(self._process)
        except OSError as error:
            # TimeoutError is an OSError.
            reason = str(error) or f"no answer within {_START_S:g} s"
            raise Unavailable(
                f"the process of the chat template does not start: {reason}"
            ) from error
        if not ready:
            raise Unavailable(
                "the process of the chat template does not start; its error is on stderr"
            )
        return self._process

    async def _reply(self, request: Mapping[str, Any], texts: list[bytes]) -> dict[str, str]:
        """Returns the reply of a process. Asks a second one if the first ends without a reply."""
        cpu_s, timeout_s = request["cpu_s"], request["timeout_s"]
        for _ in range(2):
            process = await self._started()
            try:
                async with asyncio.timeout(timeout_s):
                    reply = await _ask(process, request, texts)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"the chat template of the model did not end within {timeout_s:g} s and was "
                    "stopped; the machine is busy, try again later"
                ) from None
            if reply is not None:
                return reply
            if self._closed:
                raise Unavailable(
                    "the chat template renderer was closed, because the router is shutting down"
                )
            await self._end()
            if process.returncode == -signal.SIGPROF:
                raise DeadlineExceeded(
                    f"the chat template of the model took longer than {cpu_s:g} s of processor "
                    "time and was stopped; send shorter messages"
                )
        if process.returncode == -signal.SIGKILL:
            raise Unavailable(
                "the process of the chat template was killed twice; the machine may have no memory "
                "left"
            )
        raise InvalidArgument(
            "the chat template of the model ended its process twice; send shorter messages",
            field="messages",
        )

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            send_signal(process, signal.SIGKILL)
            process.stdin.close()
            # Reads the pipe to its end and reaps the process.
            await process.communicate()


class _Texts:
    """The texts of a request. They follow it as raw bytes, because writing megabytes as JSON would
    block the event loop.
    """

    def __init__(self) -> None:
        self.encoded: list[bytes] = []

    def add(self, text: str | None) -> int | None:
        """Adds a text and returns its place; None stays None."""
        if text is None:
            return None
        self.encoded.append(text.encode(errors="surrogatepass"))
        return len(self.encoded) - 1


def _places(message: ChatMessage, role: str, texts: _Texts) -> dict[str, Any]:
    """Returns the message in this role, with the places of its texts."""
    places: dict[str, Any] = {
        "role": texts.add(role),
        "content": texts.add(message.content),
        "tool_calls": [
            {name: texts.add(getattr(one, name)) for name in ("id", "name", "arguments")}
            for one in message.tool_calls
        ],
    }
    more = {
        "reasoning_content": message.reasoning,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    return places | {name: texts.add(text) for name, text in more.items() if text is not None}


async def _ask(
    process: asyncio.subprocess.Process, request: Mapping[str, Any], texts: list[bytes]
) -> dict[str, str] | None:
    """Returns the reply of the process; None if it ends, or if the reply is that of another call.
    Raises InvalidArgument for a long reply.
    """
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.writelines(texts)
    line = await _line(process)
    reply: dict[str, Any] = json.loads(line) if line else {}
    if reply.get("call") != request["call"]:
        return None
    return await _text(process, reply["length"]) if "length" in reply else reply


async def _line(process: asyncio.subprocess.Process) -> bytes:
    """Returns the next whole line; empty if the process is gone or the line is too long. Flushes
    pending writes first.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        await process.stdin.drain()
        line = await process.stdout.readline()
    except (ConnectionError, ValueError):
        return b""
    return line if line.endswith(b"\n") else b""


async def _text(process: asyncio.subprocess.Process, length: int) -> dict[str, str] | None:
    """Returns the reply of `length` bytes; None if the process is gone. Raises InvalidArgument if
    it is too long.
    """
    assert process.stdout is not None
    if length > _MAX_REPLY_BYTES:
        raise InvalidArgument(
            f"the chat template of the model writes {length} bytes; the most is "
            f"{_MAX_REPLY_BYTES}; send shorter messages",
            field="messages",
        )
    decoder, parts = codecs.getincrementaldecoder("utf-8")("surrogatepass"), []
    while length > 0:
        part = await process.stdout.read(min(length, _READ_BYTES))
        if not part:
            return None
        length -= len(part)
        parts.append(decoder.decode(part, final=length == 0))
    return {"text": "".join(parts)}


def _read(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelRefused(f"{path} is not UTF-8: {error!s:.300}", field="model") from error


def _template_of(entry: Any) -> str | None:
    """Returns the `chat_template` of a tokenizer_config.json: a text, or the text named `default`
    in a list.
    """
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None


def _token_text(entry: Any) -> str | None:
    """Returns a token of a tokenizer_config.json: a text, or the `content` of an object."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None
