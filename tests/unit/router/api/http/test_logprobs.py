"""Log-probabilities in the shape of chat completions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.types.requests import TokenLogprobs
from router.api.http.logprobs import chat_logprobs, completion_logprobs


@given(st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=6))
def test_bytes_are_those_of_the_token(tokens: list[bytes]) -> None:
    """A token that is a part of a character is shown as U+FFFD, which has other bytes."""
    encoded = dict(enumerate(tokens))
    texts = {number: raw.decode(errors="replace") for number, raw in encoded.items()}
    scores = [TokenLogprobs(-1.0, ((number, -1.0),)) for number in texts]
    content = chat_logprobs(list(texts), texts, encoded, scores)["content"]
    for raw, entry in zip(tokens, content, strict=True):
        assert bytes(entry["bytes"]) == raw
        assert entry["token"] == raw.decode(errors="replace")
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]


def test_the_likeliest_token_of_a_text_stands_for_it() -> None:
    """Tokens that are parts of characters share the text U+FFFD. The likeliest comes first."""
    texts = {1: "\ufffd", 2: "\ufffd", 3: "a"}
    scores = [TokenLogprobs(-0.1, ((1, -0.1), (3, -3.0), (2, -9.0)))]
    (top,) = completion_logprobs([1], texts, scores, [0])["top_logprobs"]
    assert list(top.items()) == [("\ufffd", -0.1), ("a", -3.0)]
