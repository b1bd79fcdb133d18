"""Beginnings of prompts, some of which have the block hash of another one, where hashes are
short.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from functools import cache

from simulation.toy_engine import BLOCK, FIRST_MODEL, LAYOUT, POISON

from kvrelay.engine.kvcache.block_hashes import HASH_BYTES, BlockHasher
from kvrelay.tenants import Tenant

SEARCHED = 2000  # prompts at most: with 16 bits a pair is found among 320
PAIRS = 500  # that a process searches for once, and all its seeds use
ALIKE = 6  # of pairs that have the same last block, for which it searches longer


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks: requests of one identity share cached KV."""

    tenant: str = ""
    cache_salt: str | None = None

    @property
    def owner(self) -> Tenant:
        return Tenant(name=self.tenant, salt=self.tenant)

    @property
    def salt(self) -> str:
        return self.owner.salt_for(self.cache_salt)


IDENTITIES = (
    Identity(),
    Identity(),
    Identity(cache_salt="ann"),
    Identity("other"),
    Identity("other", "ann"),
)


@dataclass(frozen=True, slots=True)
class Beginning:
    identity: Identity
    tokens: tuple[int, ...]


def plan_beginnings(rng: random.Random, hash_bytes: int) -> list[Beginning]:
    """Two for whoever asks, and two that collide at their last block, with what stands before that
    block in each.

    The two are of one identity, or of two; with long hashes they collide as little as others.
    """
    shared = [tuple(_tokens(rng, rng.choice((8, 16, 24)))) for _ in range(2)]
    found = [Beginning(rng.choice(IDENTITIES), tokens) for tokens in shared for _ in range(2)]
    search = _alike if rng.random() < 0.3 else _colliding
    for one in search(rng.randrange(ALIKE if search is _alike else PAIRS), hash_bytes):
        found += [one, one, Beginning(one.identity, one.tokens[:-BLOCK])]
    return found


@cache
def _colliding(number: int, hash_bytes: int) -> tuple[Beginning, ...]:
    """A pair; one alone if none was found."""
    rng = random.Random(number)
    asking = [rng.choice(IDENTITIES), rng.choice(IDENTITIES)]
    if rng.random() < 0.5:
        asking[1] = asking[0]
    heads = [_tokens(rng, rng.choice((0, 0, 1, 2)) * BLOCK) for _ in asking]
    seen: dict[bytes, Beginning] = {}
    searched = SEARCHED if hash_bytes < HASH_BYTES else 1
    for _ in range(searched):
        which = rng.randrange(2)
        tokens = heads[which] + _tokens(rng, BLOCK)
        one = Beginning(asking[which], tuple(tokens))
        hasher = BlockHasher(
            BLOCK, one.identity.salt, model=LAYOUT.hash(FIRST_MODEL), hash_bytes=hash_bytes
        )
        other = seen.setdefault(hasher.extend(tokens)[-1], one)
        if other != one:
            return one, other
    return (one,)


@cache
def _alike(number: int, hash_bytes: int) -> tuple[Beginning, ...]:
    """A pair with one last block and one hash: behind different first blocks, or under different
    salts.
    """
    rng = random.Random(number)
    if number % 2:
        identities, heads = [IDENTITIES[0]] * 2, [_tokens(rng, BLOCK), _tokens(rng, BLOCK)]
    else:
        identities, heads = [IDENTITIES[0], rng.choice(IDENTITIES[2:])], [[], []]
    hashers = []
    for identity, tokens in zip(identities, heads, strict=True):
        hasher = BlockHasher(
            BLOCK, identity.salt, model=LAYOUT.hash(FIRST_MODEL), hash_bytes=hash_bytes
        )
        hasher.extend(tokens)
        hashers.append(hasher)
    for _ in range(20 * 2**16 if hash_bytes < HASH_BYTES else 1):
        tail = _tokens(rng, BLOCK)
        hashes = {_hash_behind(hasher, tail) for hasher in hashers}
        if len(hashes) == 1:
            break
    return tuple(
        Beginning(identity, tuple(tokens + tail))
        for identity, tokens in zip(identities, heads, strict=True)
    )


def _hash_behind(hasher: BlockHasher, tail: list[int]) -> bytes:
    """Of the block that follows, leaving the hasher as it is."""
    return hasher.chain.then(array("i", tail).tobytes()).hash


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, POISON) for _ in range(count)]
