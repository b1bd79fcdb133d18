"""OpenAI's response bodies. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from json.encoder import encode_basestring_ascii
from typing import Any

from kvrelay.errors import KvRelayError
from kvrelay.types.requests import Ledger, TokenLogprobs, Usage
from kvrelay.wire.inference import GenerateResponse
from router.api.http.chat.answer import ChatAnswer
from router.api.http.requests import Completion

Json = dict[str, Any]
_TOKENS_AT_ONCE = 512
# Cost of an encoded and spelled token, for router.runtime.loop_slices.
_TOKEN_COST = 32
DONE = "data: [DONE]\n\n"


def to_json(body: object) -> str:
    """Encodes in ASCII: some clients take U+2028 and similar characters for the end of a line, and
    so of an event.
    """
    return json.dumps(body, separators=(",", ":"))


def event(body: object) -> str:
    """Encodes the body as a server-sent event."""
    return f"data: {to_json(body)}\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """The members that all bodies of one answer share."""

    id: str
    created: int  # unix seconds
    model: str


class Shape:
    """Writes the bodies of one answer. The members that all chunks of a stream share are encoded
    once.
    """

    def __init__(
        self,
        completion: Completion,
        head: Head,
        echoes: Sequence[str],
        answers: Sequence[ChatAnswer],
    ) -> None:
        """`echoes`: prefix of each choice's text; empty for none. `answers`: the message of each
        choice, for chats.
        """
        self._completion = completion
        self._head = head
        self._echoes = echoes
        self._answers = answers
        opened = to_json(self._body([], chunk=True)).removesuffix("]}")
        self._before = f'data: {opened}{{"index":'
        usage = completion.include_usage and not completion.continuous_usage
        self._after = ',"usage":null' if usage else ""
        # By choice.
        self._fingerprints: dict[int, str] = {}

    def chunk(
        self,
        index: int,
        response: GenerateResponse,
        logprobs: LogprobsText | None,
        usage: Usage | None,
        last: str,
    ) -> str:
        """Returns the event for one response of the choice `index`.

        - usage: the choice's usage so far, if the client wants it in each chunk.
        - last: additional members of the last chunk.
        """
        completion = self._completion
        reason: str | None = response.finish_reason
        if completion.chat:
            said = f'"delta":{{{self._answers[index].delta(response)}}}'
            reason = self._answers[index].finish_reason(response)
        else:
            begin = self._echoes[index] if completion.echo and response.index == 0 else ""
            said = f'"text":{encode_basestring_ascii(begin + response.text)}'
        ids = f',"token_ids":{to_json(response.token_ids)}' if completion.return_token_ids else ""
        finish = "null" if reason is None else f'"{reason}"'
        scores = "null" if logprobs is None else logprobs.written()
        told = self._after if usage is None else f',"usage":{to_json(usage_body([usage], 1))}'
        if response.system_fingerprint:
            self._fingerprints[index] = (
                f',"system_fingerprint":{to_json(response.system_fingerprint)}'
            )
        told += self._fingerprints.get(index, "")
        choice = f'{index},{said},"logprobs":{scores},"finish_reason":{finish}{ids}'
        return f"{self._before}{choice}}}]{told}{last}}}\n\n"

    def last_members(self, answers: Sequence[GenerateResponse]) -> str:
        """Returns the additional members of the last chunk."""
        return f',"kvrelay":{to_json(account(answers))}'

    def usage_chunk(self, answers: Sequence[GenerateResponse]) -> str:
        """Returns the event that follows all choices, with their usage."""
        usage = usage_body(_usages(answers), self._completion.n)
        return event(self._body([], chunk=True) | {"usage": usage, "kvrelay": account(answers)})

    def whole(
        self, answers: Sequence[GenerateResponse], logprobs: Sequence[LogprobsText | None]
    ) -> Generator[int, None, list[bytes]]:
        """Writes the parts of the body with all choices, in the steps of
        router.runtime.loop_slices. Each answer is one response with the full text.
        """
        usage = usage_body(_usages(answers), self._completion.n)
        fingerprint = {"system_fingerprint": answers[0].system_fingerprint or None}
        rest = fingerprint | {"usage": usage, "kvrelay": account(answers)}
        body = to_json(self._body([], chunk=False) | rest)
        before, _, after = body.partition('"choices":[]')
        parts = [f'{before}"choices":['.encode()]
        for index, (answer, one) in enumerate(zip(answers, logprobs, strict=True)):
            choice: Json = {"index": index, "finish_reason": answer.finish_reason}
            if self._completion.chat:
                choice["message"] = yield from self._answers[index].message(answer.text)
                choice["finish_reason"] = self._answers[index].finish_reason(answer)
            else:
                choice["text"] = (
                    self._echoes[index] + answer.text if self._completion.echo else answer.text
                )
            if self._completion.return_token_ids:
                choice["token_ids"] = list(answer.token_ids)
            scores = "null" if one is None else one.written()
            comma = "," if index else ""
            parts.append(f'{comma}{to_json(choice)[:-1]},"logprobs":{scores}}}'.encode())
            yield len(parts[-1])
        return [*parts, f"]{after}".encode()]

    def _body(self, choices: list[Json], chunk: bool) -> Json:
        name = "text_completion"
        if self._completion.chat:
            name = "chat.completion.chunk" if chunk else "chat.completion"
        head = self._head
        return {
            "id": head.id,
            "object": name,
            "created": head.created,
            "model": head.model,
            "choices": choices,
        }


def _usages(answers: Sequence[GenerateResponse]) -> list[Usage]:
    return [one.usage for one in answers if one.usage is not None]


def usage_body(usages: Sequence[Usage], n: int) -> Json:
    """Returns the usage of all choices. `usages` has `n` consecutive entries per prompt, and each
    prompt counts once.
    """
    prompts = usages[::n]
    prompt = sum(one.prompt_tokens for one in prompts)
    completion = sum(one.completion_tokens for one in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts)},
    }


def account(answers: Sequence[GenerateResponse]) -> Json | list[Json]:
    """Returns path, reason and ledger of the answer, or a list of them for several choices."""
    found = [
        {
            "request_id": one.request_id,
            "path": one.path,
            "why": one.why,
            "ledger": _ledger(one.ledger),
        }
        for one in answers
    ]
    return found[0] if len(found) == 1 else found


def _ledger(ledger: Ledger | None) -> Json | None:
    return None if ledger is None else asdict(ledger) | {"phases": dict(ledger.phases)}


def tokenized_steps(
    tokens: Sequence[int], max_model_len: int, spell: Callable[[Sequence[int]], list[str]] | None
) -> Generator[int, None, str]:
    """Writes the body of /tokenize's response, in the steps of router.runtime.loop_slices. With
    `spell`, the body also has each token's spelling.
    """
    lists: dict[str, list[str]] = {
        name: [] for name in ("tokens", *([] if spell is None else ["token_strs"]))
    }
    for start in range(0, len(tokens), _TOKENS_AT_ONCE):
        part = tokens[start : start + _TOKENS_AT_ONCE]
        lists["tokens"].append(to_json(part)[1:-1])
        if spell is not None:
            lists["token_strs"].append(to_json(spell(part))[1:-1])
        yield len(part) * _TOKEN_COST
    said = "".join(f',"{name}":[{",".join(parts)}]' for name, parts in lists.items())
    return f'{{"count":{len(tokens)},"max_model_len":{max_model_len}{said}}}'


def error_body(error: KvRelayError) -> Json:
    """Returns the error's body in OpenAI's shape."""
    return {
        "error": {
            "message": error.message,
            "type": error.code.openai_type,
            "param": error.field,
            "code": error.code.http_status,
        }
    }


class LogprobsText:
    """The logprobs of a growing answer, encoded as JSON."""

    def __init__(self) -> None:
        self._parts: dict[str, list[str]] = {}

    def add(self, logprobs: Json) -> None:
        """Adds the logprobs of the next tokens: lists by name, as `completion_logprobs` and
        `chat_logprobs` return them.
        """
        for name, values in logprobs.items():
            self._parts.setdefault(name, []).append(to_json(values)[1:-1])

    def extend(self, later: LogprobsText) -> None:
        """Adds the logprobs of later tokens."""
        for name, parts in later._parts.items():
            self._parts.setdefault(name, []).extend(parts)

    def written(self) -> str:
        """Returns the JSON object of all added logprobs."""
        return (
            "{"
            + ",".join(f'"{name}":[{",".join(parts)}]' for name, parts in self._parts.items())
            + "}"
        )


def completion_logprobs(
    token_ids: Sequence[int],
    texts: dict[int, str],
    logprobs: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
) -> Json:
    """Returns logprobs in the shape of /v1/completions.

    - texts: each token's own text.
    - logprobs: None for the first token of a prompt.
    - offsets: where the text of each token begins in the text of the choice.
    """
    return {
        "tokens": [texts[one] for one in token_ids],
        "token_logprobs": [None if one is None else one.logprob for one in logprobs],
        "top_logprobs": [
            None if one is None else {texts[token_id]: logprob for token_id, logprob in one.top}
            for one in logprobs
        ],
        "text_offset": list(offsets),
    }


def chat_logprobs(
    token_ids: Sequence[int], texts: dict[int, str], logprobs: Sequence[TokenLogprobs]
) -> Json:
    """Returns logprobs in the shape of /v1/chat/completions. `texts`: each token's own text.

    `bytes` is null for a token that is a part of a character: its text does not tell its bytes.
    """

    def entry(token_id: int, logprob: float) -> Json:
        text = texts[token_id]
        known = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": known}

    return {
        "content": [
            entry(token_id, one.logprob) | {"top_logprobs": [entry(*top) for top in one.top]}
            for token_id, one in zip(token_ids, logprobs, strict=True)
        ]
    }
