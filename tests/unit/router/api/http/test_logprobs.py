"""Log-probabilities in the shape of chat completions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.types.requests import TokenLogprobs
from router.api.http.logprobs import chat_logprobs


@given(st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=6))
def test_bytes_are_those_of_the_token_or_null(tokens: list[bytes]) -> None:
    """A token that is a part of a character is shown as U+FFFD, which has other bytes."""
    texts = {number: raw.decode(errors="replace") for number, raw in enumerate(tokens)}
    scores = [TokenLogprobs(-1.0, ((number, -1.0),)) for number in texts]
    content = chat_logprobs(list(texts), texts, scores)["content"]
    for raw, entry in zip(tokens, content, strict=True):
        whole = "\ufffd" not in raw.decode(errors="replace")
        assert entry["bytes"] == (list(raw) if whole else None)
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]
