"""Keys of KV blocks: what workers tell routers about the blocks of their prefix caches.

A key is the first 8 bytes of a block's hash, as a little-endian integer. The hash is keyed by the
model's layout and the tenant's salt, so a key tells nothing to a party that does not know the salt,
and nobody can search for tokens with a given key. Two of a million blocks have the same key with a
probability of 3e-8.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

KEY_BYTES = 8
# Most keys in one update of a cache.
MAX_KEYS = 2**13
# The only tier so far: the memory that the model attends in.
DEVICE_TIER = 0


def block_key(hash: bytes) -> int:
    """Returns the key of the block with this hash. Tests have hashes of fewer than 8 bytes."""
    return int.from_bytes(hash[:KEY_BYTES], "little")


def pack_keys(hashes: Iterable[bytes]) -> bytes:
    """Returns the keys of blocks with these hashes, 8 bytes each, in their order."""
    return b"".join([hash[:KEY_BYTES].ljust(KEY_BYTES, b"\0") for hash in hashes])


def unpack_keys(packed: bytes) -> tuple[int, ...]:
    """Returns the keys in their order. The length must be a multiple of 8 bytes."""
    return struct.unpack(f"<{len(packed) // KEY_BYTES}Q", packed)
