"""OpenAI's response bodies. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvrelay.errors import KvRelayError
from kvrelay.types import Ledger, TokenLogprobs, Usage
from kvrelay.wire.inference import GenerateResponse
from router.openai_request import Completion

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """What all bodies of one answer have in common."""

    completion: Completion
    id: str
    created: int  # unix seconds
    model: str

    def chunk(self, index: int, response: GenerateResponse, logprobs: Json | None) -> Json:
        """What one response of the choice `index` adds."""
        choice: Json = {"index": index, "logprobs": logprobs, "finish_reason": response.finish_reason}
        if self.completion.chat:
            delta: Json = {"content": response.text} if response.token_ids or response.text else {}
            choice["delta"] = {"role": "assistant"} | delta if response.index == 0 and response.token_ids else delta
        else:
            choice["text"] = response.text
        return self._body([self._with_ids(choice, response.token_ids)], chunk=True)

    def usage_chunk(self, usages: Sequence[Usage]) -> Json:
        return self._body([], chunk=True) | {"usage": usage_body(usages)}

    def whole(self, answers: Sequence[GenerateResponse], logprobs: Sequence[Json | None]) -> Json:
        """All choices, each as one response that holds all of its answer."""
        choices = []
        for index, (answer, one) in enumerate(zip(answers, logprobs, strict=True)):
            choice: Json = {"index": index, "logprobs": one, "finish_reason": answer.finish_reason}
            if self.completion.chat:
                choice["message"] = {"role": "assistant", "content": answer.text}
            else:
                choice["text"] = answer.text
            choices.append(self._with_ids(choice, answer.token_ids))
        usages = [answer.usage for answer in answers if answer.usage is not None]
        return self._body(choices, chunk=False) | {"usage": usage_body(usages), "kvrelay": account(answers)}

    def _with_ids(self, choice: Json, token_ids: Sequence[int]) -> Json:
        return choice | {"token_ids": list(token_ids)} if self.completion.return_token_ids else choice

    def _body(self, choices: list[Json], chunk: bool) -> Json:
        name = "text_completion"
        if self.completion.chat:
            name = "chat.completion.chunk" if chunk else "chat.completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}


def usage_body(usages: Sequence[Usage]) -> Json:
    prompt = sum(one.prompt_tokens for one in usages)
    completion = sum(one.completion_tokens for one in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in usages)},
    }


def account(answers: Sequence[GenerateResponse]) -> Json | list[Json]:
    """Path, reason and ledger of the answer; of several prompts' answers, a list in their order."""
    found = [
        {"request_id": one.request_id, "path": one.path, "why": one.why, "ledger": _ledger(one.ledger)}
        for one in answers
    ]
    return found[0] if len(found) == 1 else found


def _ledger(ledger: Ledger | None) -> Json | None:
    return None if ledger is None else asdict(ledger) | {"phases": dict(ledger.phases)}


def error_body(error: KvRelayError) -> Json:
    return {
        "error": {
            "message": error.message,
            "type": error.code.openai_type,
            "param": error.field,
            "code": error.code.http_status,
        }
    }


def completion_logprobs(
    token_ids: Sequence[int], texts: dict[int, str], logprobs: Sequence[TokenLogprobs], offset: int
) -> Json:
    """`texts`: each token's own text. `offset`: characters of the answer before these tokens."""
    offsets = []
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(texts[token_id])
    return {
        "tokens": [texts[one] for one in token_ids],
        "token_logprobs": [one.logprob for one in logprobs],
        "top_logprobs": [{texts[token_id]: logprob for token_id, logprob in one.top} for one in logprobs],
        "text_offset": offsets,
    }


def chat_logprobs(token_ids: Sequence[int], texts: dict[int, str], logprobs: Sequence[TokenLogprobs]) -> Json:
    def entry(token_id: int, logprob: float) -> Json:
        return {"token": texts[token_id], "logprob": logprob, "bytes": list(texts[token_id].encode())}

    return {
        "content": [
            entry(token_id, one.logprob) | {"top_logprobs": [entry(*top) for top in one.top]}
            for token_id, one in zip(token_ids, logprobs, strict=True)
        ]
    }
