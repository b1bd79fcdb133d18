"""Anthropic's answers to /v1/messages. Pure."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from pydantic_core import from_json

from kvrelay.errors import KvRelayError
from kvrelay.types.requests import Usage
from kvrelay.wire.inference import GenerateResponse
from router.api.http.account import account
from router.api.http.chat.answer import Part, Parts
from router.api.http.dialects.anthropic.errors import error_body
from router.api.http.dialects.dialect import Opened
from router.api.http.encoding import named_event, to_json
from router.api.http.logprobs import LogprobsText
from router.frontend.answer_parsers.events import (
    CallArguments,
    CallStarted,
    Content,
    Event,
    Reasoning,
)

Json = dict[str, Any]
_PING = named_event("ping", '{"type":"ping"}')
_STOP = named_event("message_stop", '{"type":"message_stop"}')


class MessagesShape:
    """Writes one message. See AnswerShape."""

    def __init__(self, opened: Opened) -> None:
        self._completion = opened.choices.completion
        self._stream = opened.choices.streams[0]
        self._head = opened.head
        self._answer = opened.answers[0]
        # The blocks of a whole answer; of a stream, the last one without its text.
        self._parts = Parts()
        # Index of the block that grows.
        self._index = -1
        self._last: GenerateResponse | None = None

    def begin(self) -> str:
        """See AnswerShape."""
        message = self._message([], None, None, self._stream.usage())
        message["usage"]["output_tokens"] = 0
        start = {"type": "message_start", "message": message}
        return named_event("message_start", to_json(start)) + _PING

    def chunk(self, index: int, response: GenerateResponse, logprobs: LogprobsText | None) -> str:
        """See AnswerShape."""
        written = [self._written(said) for said in self._answer.hear(response)]
        self._last = response
        return "".join(written)

    def end(self) -> str:
        """See AnswerShape."""
        assert self._last is not None, "a stream ends with a response"
        reason, stop = self._stop_reason(self._last)
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": self._usage(self._last.usage or Usage()),
            "kvrelay": account([self._last]),
        }
        return self._block_end() + named_event("message_delta", to_json(delta)) + _STOP

    def failed(self, error: KvRelayError) -> str:
        """See AnswerShape."""
        return named_event("error", to_json(error_body(error, self._completion.request_id)))

    def hear(self, index: int, response: GenerateResponse) -> None:
        """See AnswerShape."""
        self._parts.add(self._answer.hear(response))

    def whole(
        self, answers: Sequence[GenerateResponse], logprobs: Sequence[LogprobsText | None]
    ) -> Generator[int, None, list[bytes]]:
        """See AnswerShape."""
        (last,) = answers
        content = []
        for part in self._parts:
            content.append(self._block(part, part.text, self._head.id))
            yield len(part.text)
        reason, stop = self._stop_reason(last)
        message = self._message(content, reason, stop, last.usage or Usage())
        body = to_json(message | {"kvrelay": account([last])}).encode()
        yield len(body)
        return [body]

    def _written(self, said: Event) -> str:
        """Returns the events of a stream for what was said."""
        begun = self._block_begin(said) if self._parts.begins(said) else ""
        match said:
            case CallStarted():
                return begun
            case CallArguments(_, text):
                kind, name = "input_json_delta", "partial_json"
            case Content(text):
                kind, name = "text_delta", "text"
            case Reasoning(text):
                kind, name = "thinking_delta", "thinking"
        return f"{begun}{self._delta(kind, name, text)}"

    def _block_begin(self, said: Event) -> str:
        ended = self._block_end()
        self._parts = Parts()
        self._parts.begin(said)
        self._index += 1
        start = {
            "type": "content_block_start",
            "index": self._index,
            "content_block": self._block(self._parts.last),
        }
        return ended + named_event("content_block_start", to_json(start))

    def _block_end(self) -> str:
        if self._index < 0:
            return ""
        signed = ""
        if self._parts.last.kind is Reasoning:
            signed = self._delta("signature_delta", "signature", self._head.id)
        stop = f'{{"type":"content_block_stop","index":{self._index}}}'
        return signed + named_event("content_block_stop", stop)

    def _delta(self, kind: str, name: str, text: str) -> str:
        delta = f'{{"type":"{kind}","{name}":{encode_basestring_ascii(text)}}}'
        return named_event(
            "content_block_delta",
            f'{{"type":"content_block_delta","index":{self._index},"delta":{delta}}}',
        )

    def _block(self, part: Part, text: str = "", signature: str = "") -> Json:
        """Returns the block of a whole answer, or the block with which it begins in a stream."""
        if part.kind is CallStarted:
            return {
                "type": "tool_use",
                "id": self._answer.call_id(part.index),
                "name": part.name,
                "input": _input(text),
            }
        if part.kind is Content:
            return {"type": "text", "text": text}
        # Clients send thinking back with its signature, which is not checked.
        return {"type": "thinking", "thinking": text, "signature": signature}

    def _message(
        self, content: list[Json], reason: str | None, stop: str | None, usage: Usage
    ) -> Json:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": self._usage(usage),
        }

    def _stop_reason(self, last: GenerateResponse) -> tuple[str, str | None]:
        """Returns the reason, and the stop sequence that ended the answer."""
        if last.finish_reason == "length":
            asked = self._completion.requests[0].sampling.max_tokens
            cut = asked != self._stream.request.sampling.max_tokens
            return ("model_context_window_exceeded" if cut else "max_tokens"), None
        stop = self._stream.stop_string
        if stop is not None:
            return "stop_sequence", stop
        return ("tool_use" if self._answer.called else "end_turn"), None

    def _usage(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._answer.reasoning_tokens},
        }


def _input(arguments: str) -> Json:
    """Returns the arguments of a call as an object. Of arguments that were cut off, it has what is
    complete, as Anthropic's clients read them from a stream.
    """
    try:
        found = from_json(arguments or "{}", allow_partial=True, allow_inf_nan=False)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}
