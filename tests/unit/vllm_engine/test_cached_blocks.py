"""Routers know the blocks in vLLM's prefix cache by kvrelay's hashes."""

from __future__ import annotations

import random

import pytest

from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.types.block_keys import block_key
from kvrelay.vllm_engine.cached_blocks import CacheChanges, CachedBlocks, StoredBlocks

SIZE = 4


def hasher(salt: str) -> BlockHasher:
    return BlockHasher(SIZE, salt, model="m")


def names(tokens: list[int], salt: str = "") -> list[bytes]:
    return hasher(salt).extend(tokens)


def theirs_of(salt: str, tokens: tuple[int, ...]) -> bytes:
    """Stands for vLLM's hash of a block: another function of the same content."""
    return repr((salt, tokens)).encode()


def theirs(tokens: list[int], salt: str, number: int) -> bytes:
    return theirs_of(salt, tuple(tokens[: (number + 1) * SIZE]))


def stored(tokens: list[int], start: int, end: int, salt: str = "") -> StoredBlocks:
    """The blocks `start` to `end` of the sequence."""
    return StoredBlocks(
        tuple(theirs(tokens, salt, one) for one in range(start, end)),
        tuple(tokens[start * SIZE : end * SIZE]),
        theirs(tokens, salt, start - 1) if start else None,
        salt if not start else "",
    )


@pytest.mark.parametrize("seed", range(40))
def test_they_are_those_of_the_sequences_that_vllm_has_cached(seed: int) -> None:
    draw = random.Random(seed)
    cached = CachedBlocks(30, hasher)
    # kvrelay's hashes, by the salt and tokens that vLLM's hash stands for.
    held: dict[tuple[str, tuple[int, ...]], bytes] = {}
    told: set[bytes] = set()
    for _ in range(60):
        # Few token ids, so that sequences share prefixes.
        tokens = [draw.randrange(2) for _ in range(draw.randrange(SIZE, 7 * SIZE))]
        salt = draw.choice(["", "a", "b"])
        mine, blocks = names(tokens, salt), len(tokens) // SIZE
        cut = draw.randrange(blocks + 1)
        parts = tuple(
            stored(tokens, first, end, salt)
            for first, end in ((0, cut), (cut, blocks))
            if first < end
        )
        new = {(salt, tuple(tokens[: (one + 1) * SIZE])): mine[one] for one in range(blocks)}
        # Whatever is evicted for them, or they themselves.
        gone = draw.choices(sorted(held | new), k=draw.randrange(4))
        held |= new
        while True:
            leaving = [one for one in held if any(_follows(one, other) for other in gone)]
            for one in leaving:
                del held[one]
            gone += leaving
            if len(held) <= cached.num_blocks:
                break
            gone.append(draw.choice(sorted(held)))
        cached.apply(CacheChanges(parts, frozenset(theirs_of(*one) for one in gone)))
        changes = cached.journal.drain()
        told = (told | set(changes.stored)) - set(changes.removed)
        assert told == set(cached.hashes(0, cached.num_blocks)) == set(held.values())
        assert cached.num_named == len(told)
        checksum = 0
        for one in told:
            checksum ^= block_key(one)
        assert checksum == cached.journal.checksum


def _follows(one: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]]) -> bool:
    """Whether the block is `other` or comes after it."""
    return one[0] == other[0] and one[1][: len(other[1])] == other[1]


def test_a_whole_sequence_is_known_and_found_by_its_hashes() -> None:
    cached = CachedBlocks(8, hasher)
    tokens = list(range(5 * SIZE))
    cached.apply(CacheChanges((stored(tokens, 0, 2, "s"), stored(tokens, 2, 5, "s"))))
    assert set(cached.hashes(0, 8)) == set(names(tokens, "s"))
    cached.apply(CacheChanges(gone=frozenset({theirs(tokens, "s", 4)})))
    assert set(cached.hashes(0, 8)) == set(names(tokens, "s")[:4])


def test_a_block_that_is_told_twice_counts_once() -> None:
    cached = CachedBlocks(8, hasher)
    one = stored(list(range(2 * SIZE)), 0, 2)
    cached.apply(CacheChanges((one, one)))
    cached.apply(CacheChanges((one,)))
    assert cached.num_named == 2
    cached.apply(CacheChanges(gone=frozenset(one.hashes)))
    assert (cached.num_named, cached.hashes(0, 8), cached.journal.checksum) == (0, [], 0)


def test_what_follows_an_unknown_block_stays_unknown() -> None:
    cached = CachedBlocks(8, hasher)
    cached.apply(CacheChanges((stored(list(range(3 * SIZE)), 1, 3), StoredBlocks((), ()))))
    assert cached.num_named == 0


def test_more_blocks_than_vllm_has_are_not_taken() -> None:
    cached = CachedBlocks(2, hasher)
    cached.apply(CacheChanges((stored(list(range(5 * SIZE)), 0, 5),)))
    assert cached.num_named == 2
