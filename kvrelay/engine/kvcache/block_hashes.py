"""Hashes of KV blocks. The prefix cache indexes blocks by hash and compares the content of each
match.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from kvrelay.types.kv_block import IDENTITY_BYTES

HASH_BYTES = 16
_TOKEN_BYTES = 4
_IDENTITY = b"kvr identity"


class HashChain:
    """The hash of a full block, from which those of the blocks after it follow."""

    __slots__ = ("_state",)

    def __init__(self, state: hashlib.blake2b) -> None:
        self._state = state

    @property
    def hash(self) -> bytes:
        """The hash of all tokens so far."""
        return self._state.digest()

    def then(self, tokens: bytes) -> HashChain:
        """Returns the chain with the next block, whose token ids are given as int32."""
        state = self._state.copy()
        state.update(tokens)
        return HashChain(state)


class BlockHasher:
    """Hashes a growing sequence block by block. Each hash covers all tokens up to its block's end.

    A block's hash is BLAKE2b (RFC 7693) over the sequence's token ids as int32, keyed by the root:
    the model, the adapter and the salt. Without the salt, a party cannot search for a prompt that
    has a hash of the tenant's. Only full blocks have a hash. A small `hash_bytes` makes collisions,
    for tests.
    """

    def __init__(
        self,
        block_size: int,
        salt: str = "",
        *,
        model: str = "",
        adapter: str = "",
        hash_bytes: int = HASH_BYTES,
    ) -> None:
        self.block_size = block_size
        # Ids of models and adapters contain neither NUL nor +, so no two combinations have the same
        # root.
        self.root = f"{model}+{adapter}\0{salt}" if adapter else f"{model}\0{salt}"
        self.hashes: list[bytes] = []
        # The token ids of each hashed block alone, as int32.
        self.tokens: list[bytes] = []
        key = hashlib.blake2b(self.root.encode(), digest_size=32).digest()
        # Of all hashed blocks.
        self.chain = HashChain(hashlib.blake2b(key=key, digest_size=hash_bytes))
        self._identity = hashlib.blake2b(key=key, digest_size=IDENTITY_BYTES, person=_IDENTITY)
        self._identities: list[bytes] = []

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Takes the whole sequence so far; returns the hashes of all its full blocks.

        Hashes only blocks that are new since the last call.
        """
        size = self.block_size
        start, end = len(self.hashes) * size, len(token_ids) // size * size
        new = array("i", token_ids[start:end]).tobytes()
        for first in range(0, len(new), size * _TOKEN_BYTES):
            tokens = new[first : first + size * _TOKEN_BYTES]
            self.chain = self.chain.then(tokens)
            self.tokens.append(tokens)
            self.hashes.append(self.chain.hash)
        return self.hashes

    def identities(self) -> list[bytes]:
        """The identities of all hashed blocks; see `BlockKey`. Computed on request, since only
        blocks that leave the pool need one.
        """
        for tokens in self.tokens[len(self._identities) :]:
            self._identity.update(tokens)
            self._identities.append(self._identity.copy().digest())
        return self._identities


def hashed(token_ids: Sequence[int], block_size: int, salt: str = "") -> BlockHasher:
    """A hasher that has taken all full blocks of `token_ids`."""
    hasher = BlockHasher(block_size, salt)
    hasher.extend(token_ids)
    return hasher
