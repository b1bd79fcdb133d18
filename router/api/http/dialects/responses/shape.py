"""Answers to /v1/responses. Pure."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from kvrelay.errors import Code, KvRelayError
from kvrelay.types.requests import Usage
from kvrelay.wire.inference import GenerateResponse
from router.api.http.account import account
from router.api.http.chat.answer import Part, Parts
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
# A text as JSON.
_EMPTY = '""'
# Begins the ids of responses.
PREFIX = "resp_"
# Begins the ids of the items.
_PREFIXES = {Content: "msg", Reasoning: "rs", CallStarted: "fc"}
# The codes that OpenAI's clients know.
_ERROR_CODES = {
    Code.RESOURCE_EXHAUSTED: "rate_limit_exceeded",
    Code.INVALID_ARGUMENT: "invalid_prompt",
}


class ResponseShape:
    """Writes one response: items of reasoning, text and calls. See AnswerShape.

    Its parts are written as JSON text, so that a text is encoded once.
    """

    def __init__(self, opened: Opened) -> None:
        self._stream = opened.choices.streams[0]
        self._head = opened.head
        self._answer = opened.answers[0]
        completion = opened.choices.completion
        self._repeated = to_json(completion.repeated)[1:-1]
        self._parts = Parts()
        # Logprobs of the growing part, and of tokens that have told nothing yet.
        self._scores = LogprobsText()
        self._untold = LogprobsText()
        # The items that are complete, as JSON.
        self._items: list[str] = []
        self._sequence = -1
        self._last: GenerateResponse | None = None

    def begin(self) -> str:
        """See AnswerShape."""
        body = self._response("in_progress")
        return self._event("response.created", f'"response":{body}') + self._event(
            "response.in_progress", f'"response":{body}'
        )

    def chunk(self, index: int, response: GenerateResponse, logprobs: LogprobsText | None) -> str:
        """See AnswerShape."""
        self._last = response
        if logprobs is not None:
            self._untold.take(logprobs)
        written = []
        for said in self._answer.hear(response):
            begins = self._parts.begins(said)
            if begins:
                written.append(self._item_end("completed"))
            self._parts.add([said])
            if begins:
                written.append(self._item_begin())
            written.append(self._delta(said))
        return "".join(written)

    def end(self) -> str:
        """See AnswerShape."""
        assert self._last is not None, "a stream ends with a response"
        status = self._status(self._last)
        self._scores.take(self._untold)
        ended = self._item_end(status)
        body = self._response(status, self._last)
        return ended + self._event(f"response.{status}", f'"response":{body}')

    def failed(self, error: KvRelayError) -> str:
        """See AnswerShape."""
        code = _ERROR_CODES.get(error.code, "server_error")
        told = {"code": code, "message": error.message}
        return self._event("response.failed", f'"response":{self._response("failed", None, told)}')

    def hear(self, index: int, response: GenerateResponse) -> None:
        """See AnswerShape."""
        self._parts.add(self._answer.hear(response))

    def whole(
        self, answers: Sequence[GenerateResponse], logprobs: Sequence[LogprobsText | None]
    ) -> Generator[int, None, list[bytes]]:
        """See AnswerShape."""
        (last,) = answers
        status = self._status(last)
        texts = [number for number, one in enumerate(self._parts) if one.kind is Content]
        for number, part in enumerate(self._parts):
            # The logprobs of a whole answer go with its last text.
            scores = logprobs[0] if texts and number == texts[-1] else None
            final = status if number == len(self._parts) - 1 else "completed"
            text = encode_basestring_ascii(part.text)
            self._items.append(self._item(number, part, final, text, scores))
            yield len(text)
        body = self._response(status, last).encode()
        yield len(body)
        return [body]

    def _event(self, name: str, members: str) -> str:
        self._sequence += 1
        data = f'{{"type":"{name}","sequence_number":{self._sequence},{members}}}'
        return named_event(name, data)

    def _item_begin(self) -> str:
        """Returns the events with which the growing item begins."""
        self._scores = LogprobsText()
        number, part = len(self._parts) - 1, self._parts.last
        item = self._item(number, part, "in_progress", None)
        added = self._event("response.output_item.added", f'"output_index":{number},"item":{item}')
        if part.kind is CallStarted:
            return added
        empty = _text_part(part, _EMPTY, None)
        return added + self._event(
            "response.content_part.added", f'{self._place(part)},"part":{empty}'
        )

    def _item_end(self, status: str) -> str:
        """Returns the events with which the growing item ends."""
        if len(self._items) == len(self._parts):
            return ""
        number, part = len(self._parts) - 1, self._parts.last
        place, text = self._place(part), encode_basestring_ascii(part.text)
        scores = self._scores if part.kind is Content else None
        item = self._item(number, part, status, text, scores)
        self._items.append(item)
        if part.kind is CallStarted:
            name = encode_basestring_ascii(part.name)
            done = self._event(
                "response.function_call_arguments.done",
                f'{place},"name":{name},"arguments":{text}',
            )
        else:
            kind, more = "reasoning_text", ""
            if part.kind is Content:
                kind, more = "output_text", f',"logprobs":{_entries(scores)}'
            done = self._event(f"response.{kind}.done", f'{place},"text":{text}{more}')
            whole = _text_part(part, text, scores)
            done += self._event("response.content_part.done", f'{place},"part":{whole}')
        return done + self._event(
            "response.output_item.done", f'"output_index":{number},"item":{item}'
        )

    def _delta(self, said: Event) -> str:
        logprobs = _entries(self._untold)
        self._scores.take(self._untold)
        if isinstance(said, CallStarted):
            return ""
        part, text = self._parts.last, encode_basestring_ascii(said.text)
        members = f'{self._place(part)},"delta":{text}'
        if isinstance(said, CallArguments):
            return self._event("response.function_call_arguments.delta", members)
        if isinstance(said, Reasoning):
            return self._event("response.reasoning_text.delta", members)
        return self._event("response.output_text.delta", f'{members},"logprobs":{logprobs}')

    def _place(self, part: Part) -> str:
        """Returns the members that name the growing item, and the place in it."""
        number = len(self._parts) - 1
        place = f'"item_id":{self._id(number, part)},"output_index":{number}'
        return place if part.kind is CallStarted else f'{place},"content_index":0'

    def _id(self, number: int, part: Part) -> str:
        base = self._head.id.removeprefix(PREFIX)
        return encode_basestring_ascii(f"{_PREFIXES[part.kind]}_{base}_{number}")

    def _item(
        self,
        number: int,
        part: Part,
        status: str,
        text: str | None,
        scores: LogprobsText | None = None,
    ) -> str:
        """Returns an item as JSON. `text`: as JSON; None before its content begins."""
        head = f'"id":{self._id(number, part)},"status":"{status}"'
        if part.kind is CallStarted:
            name, call_id = encode_basestring_ascii(part.name), self._answer.call_id(part.index)
            call = f'"call_id":"{call_id}","name":{name},"arguments":{text or _EMPTY}'
            return f'{{{head},"type":"function_call",{call}}}'
        content = "" if text is None else _text_part(part, text, scores)
        if part.kind is Content:
            return f'{{{head},"type":"message","role":"assistant","content":[{content}]}}'
        more = '"encrypted_content":null'
        return f'{{{head},"type":"reasoning","summary":[],"content":[{content}],{more}}}'

    def _response(
        self, status: str, last: GenerateResponse | None = None, error: Json | None = None
    ) -> str:
        """Returns the response as JSON. `last`: the last part of the answer, at its end."""
        head = self._head
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        members: Json = {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": reason,
            "model": head.model,
            "usage": None if last is None else self._usage(last.usage or Usage()),
        }
        if last is not None:
            members["kvrelay"] = account([last])
        output = ",".join(self._items)
        return f'{to_json(members)[:-1]},{self._repeated},"output":[{output}]}}'

    def _status(self, last: GenerateResponse) -> str:
        return "incomplete" if last.finish_reason == "length" else "completed"

    def _usage(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._answer.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _text_part(part: Part, text: str, scores: LogprobsText | None) -> str:
    """Returns the content part of an item as JSON. `text`: as JSON."""
    if part.kind is Reasoning:
        return f'{{"type":"reasoning_text","text":{text}}}'
    more = f'"annotations":[],"logprobs":{_entries(scores)}'
    return f'{{"type":"output_text","text":{text},{more}}}'


def _entries(scores: LogprobsText | None) -> str:
    """Returns the list of the logprobs as JSON."""
    return "[]" if scores is None else f"[{scores.entries('content')}]"
