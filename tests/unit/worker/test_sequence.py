from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.sequence import Sequence

EOS = frozenset({1})


def sequence(
    tokens: range | list[int], *, prompt_len: int | None = None, salt: str = "", **sampling: object
) -> Sequence:
    tokens = tuple(tokens)
    spec = SequenceSpec(
        "r", 0, tokens, prompt_len or len(tokens), SamplingParams(seed=0, **sampling), salt
    )  # type: ignore[arg-type]
    return Sequence(spec, arrived=0.0, hasher=BlockHasher(4, salt))


def test_blocks_follow_tokens_and_the_prefix_is_found_again() -> None:
    cache = KvCache(8, 4)
    first = sequence(range(10))
    first.take_prefix(cache)
    first.take_blocks(cache, 10)
    assert (first.num_computed, len(first.blocks), first.uncomputed) == (0, 3, 10)
    first.advance(cache, 10)
    first.drop_blocks(cache)
    assert cache.pool.num_cached == 2, "two of the three blocks were full"

    second = sequence(range(10))
    second.take_prefix(cache)
    assert (second.num_computed, second.uncomputed) == (8, 2)
    second.drop_blocks(cache)
    cache.check_integrity()
    assert cache.pool.num_held == 0


def test_cached_blocks_are_the_tenants() -> None:
    cache = KvCache(8, 4)
    one = sequence(range(10))
    one.spec = replace(one.spec, tenant="acme")
    one.take_blocks(cache, 10)
    one.advance(cache, 10)
    one.drop_blocks(cache)
    assert (cache.pool.cached_of("acme"), cache.pool.cached_of("")) == (2, 0)


def test_a_prefix_never_covers_the_whole_sequence() -> None:
    cache = KvCache(8, 4)
    first = sequence(range(8))
    first.take_blocks(cache, 8)
    first.advance(cache, 8)
    second = sequence(range(8))
    second.take_prefix(cache)
    assert second.num_computed == 4, "the last token has to be computed for its logits"


def test_another_tenant_finds_nothing() -> None:
    cache = KvCache(8, 4)
    first = sequence(range(9), salt="a")
    first.take_blocks(cache, 9)
    first.advance(cache, 9)
    second = sequence(range(9), salt="b")
    second.take_prefix(cache)
    assert second.num_computed == 0


def test_blocks_that_are_not_there_change_nothing() -> None:
    cache = KvCache(2, 4)
    one = sequence(range(12))
    with pytest.raises(OutOfBlocks):
        one.take_blocks(cache, 12)
    assert one.blocks == []
    assert cache.pool.units_available == 2


@pytest.mark.parametrize(
    ("sampling", "token", "reason"),
    [
        ({"max_tokens": 9}, 5, None),
        ({"max_tokens": 9}, 1, "stop"),
        ({"max_tokens": 9, "ignore_eos": True}, 1, None),
        ({"max_tokens": 9, "min_tokens": 2}, 1, None),
        ({"max_tokens": 9, "stop_token_ids": (7,)}, 7, "stop"),
        ({"max_tokens": 9, "stop_token_ids": (7,), "ignore_eos": True}, 7, "stop"),
        ({"max_tokens": 1}, 5, "length"),
        ({"max_tokens": 1}, 1, "stop"),
    ],
)
def test_why_an_answer_ends(sampling: dict[str, object], token: int, reason: str | None) -> None:
    assert sequence(range(3), **sampling).append(token, EOS, max_model_len=100) == reason


def test_an_answer_ends_with_the_context() -> None:
    one = sequence(range(3), max_tokens=50)
    assert one.append(9, EOS, max_model_len=5) is None
    assert one.append(9, EOS, max_model_len=5) == "length"


def test_a_resumed_sequence_counts_what_was_emitted_before() -> None:
    one = sequence(range(6), prompt_len=4, max_tokens=3)
    assert one.num_emitted == 2
    assert one.append(9, EOS, max_model_len=100) == "length"
