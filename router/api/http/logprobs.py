"""Log-probabilities in OpenAI's shapes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.types.requests import TokenLogprobs
from router.api.http.encoding import to_json

Json = dict[str, Any]


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

    def take(self, other: LogprobsText) -> None:
        """Moves the logprobs of the other to the end of these."""
        for name, parts in other._parts.items():
            self._parts.setdefault(name, []).extend(parts)
        other._parts = {}

    def written(self) -> str:
        """Returns the JSON object of all added logprobs."""
        return "{" + ",".join(f'"{name}":[{self.entries(name)}]' for name in self._parts) + "}"

    def entries(self, name: str) -> str:
        """Returns the entries of the list `name`, as they stand in JSON."""
        return ",".join(self._parts.get(name, ()))


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
        "top_logprobs": [None if one is None else _by_text(one.top, texts) for one in logprobs],
        "text_offset": list(offsets),
    }


def _by_text(top: Sequence[tuple[int, float]], texts: dict[int, str]) -> dict[str, float]:
    """Returns the likeliest token of each text, likeliest first. Tokens that are parts of
    characters share one text.
    """
    found: dict[str, float] = {}
    for token_id, logprob in top:
        found.setdefault(texts[token_id], logprob)
    return found


def chat_logprobs(
    token_ids: Sequence[int],
    texts: dict[int, str],
    encoded: dict[int, bytes],
    logprobs: Sequence[TokenLogprobs],
) -> Json:
    """Returns logprobs in the shape of /v1/chat/completions. `texts` and `encoded`: each token's
    own text, and its bytes, which the text of a token that is a part of a character does not tell.
    """

    def entry(token_id: int, logprob: float) -> Json:
        known = list(encoded[token_id])
        return {"token": texts[token_id], "logprob": logprob, "bytes": known}

    return {
        "content": [
            entry(token_id, one.logprob) | {"top_logprobs": [entry(*top) for top in one.top]}
            for token_id, one in zip(token_ids, logprobs, strict=True)
        ]
    }
