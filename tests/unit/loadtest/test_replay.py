from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.lengths import Uniform
from kvrelay.loadtest.traces.replay import Replay, block_size, fitted, planned, scaled
from kvrelay.loadtest.traces.trace import TraceRequest

SAMPLE = Path(__file__).parent / "traces" / "mooncake_conversation_60.jsonl"
REQUESTS = st.lists(
    st.builds(TraceRequest, st.floats(0, 100), st.integers(1, 5000), st.integers(0, 3000)),
    min_size=1,
    max_size=20,
)


def replay(**changes: object) -> Replay:
    values: dict[str, object] = {
        "trace": SAMPLE,
        "form": "mooncake",
        "begin": 0.0,
        "time_scale": Fraction(1),
        "length_scale": Fraction(1, 32),
        "num_requests": None,
        "duration": None,
        "prompt_tokens": Uniform(1, 1),
        "output_tokens": Uniform(1, 1),
        "seed": 0,
    }
    return Replay(**values | changes)  # type: ignore[arg-type]


def test_requests_share_exactly_the_prefixes_that_their_blocks_say() -> None:
    requests = replay().requests()
    prompts = [one.token_ids or () for one in replay().plan(vocab_size=2048)]
    size = block_size(Fraction(1, 32))
    assert size == 16
    for first, a in zip(requests, prompts, strict=True):
        assert len(a) == first.input_tokens == math.ceil(first.input_tokens)
        for second, b in zip(requests, prompts, strict=True):
            shared = next(
                (
                    n
                    for n, (x, y) in enumerate(zip(first.blocks, second.blocks, strict=False))
                    if x != y
                ),
                None,
            )
            shared = min(len(first.blocks), len(second.blocks)) if shared is None else shared
            same = next(
                (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                min(len(a), len(b)),
            )
            assert same >= min(shared * size, len(a), len(b))
            # Another block begins with other tokens, but for a few by chance
            assert same // size <= shared


def test_a_replay_is_the_same_each_time_and_another_with_another_seed() -> None:
    assert list(replay().plan(2048)) == list(replay().plan(2048))
    assert list(replay().plan(2048)) != list(replay(seed=1).plan(2048))


def test_times_and_lengths_are_scaled() -> None:
    one = TraceRequest(30.0, 1000, 10, (1, 2))
    (found,) = scaled([one], 10.0, Fraction(1, 4), Fraction(1, 32))
    assert found == TraceRequest(5.0, 32, 1, (1, 2))


def test_a_replay_ends_where_it_is_told() -> None:
    assert len(replay(num_requests=7).requests()) == 7
    everything = replay().requests()
    some = replay(duration=4.0).requests()
    assert some == [one for one in everything if one.at < 4.0]
    assert 0 < len(some) < len(everything)
    later = replay(begin=3.0, time_scale=Fraction(2)).requests()
    assert [one.at for one in later] == [2 * (one.at - 3.0) for one in everything if one.at >= 3.0]
    with pytest.raises(InvalidArgument, match="no request"):
        replay(begin=1e6).requests()


@given(REQUESTS, st.integers(2, 4096))
def test_what_is_sent_fits_and_what_is_cut_is_told(
    requests: list[TraceRequest], context: int
) -> None:
    fitting = list(fitted(requests, context))
    for before, after in zip(requests, fitting, strict=True):
        assert 1 <= after.input_tokens <= before.input_tokens
        assert after.input_tokens + after.output_tokens <= max(
            context, before.input_tokens + before.output_tokens
        )
        if before.input_tokens + before.output_tokens <= context:
            assert after == before
        else:
            assert after.input_tokens + after.output_tokens == context
    assert list(fitted(requests, 0)) == requests  # no limit is known


def test_a_cut_is_counted() -> None:
    found = replay(num_requests=5).cut(100)
    tokens = [one.input_tokens + one.output_tokens for one in replay(num_requests=5).requests()]
    assert found.of_tokens == sum(tokens)
    assert found.requests == sum(one > 100 for one in tokens) > 0
    assert found.tokens == sum(one - 100 for one in tokens if one > 100)
    assert replay(num_requests=5).cut(10**6).tokens == 0


def test_a_scale_that_breaks_blocks_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="1/32"):
        block_size(Fraction(1, 1000))


def test_requests_without_blocks_get_tokens_of_their_own() -> None:
    requests = [TraceRequest(0.0, 50, 3), TraceRequest(1.0, 50, 3)]
    first, second = planned(requests, 0, 100, seed=1)
    assert first.token_ids is not None
    assert second.token_ids is not None
    assert len(first.token_ids) == len(second.token_ids) == 50
    assert first.token_ids != second.token_ids
    assert max(first.token_ids) < 100


def test_drawn_tokens_are_the_same_objects() -> None:
    """So a token of a long trace costs a pointer, not a number of its own."""
    tokens = [token for one in replay().plan(vocab_size=2048) for token in one.token_ids or ()]
    assert len(tokens) > 10_000
    assert len(set(map(id, tokens))) <= 2048
