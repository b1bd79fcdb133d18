"""The key of a KV block outside of the block pool. Frozen, slotted, without I/O."""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass

IDENTITY_BYTES = 32
_DIGITS = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Says which tokens' KV a block holds, wherever the block is and also after a restart.

    `hash` is the block's hash in the prefix cache, under which workers report it. `identity` is a
    BLAKE2b of 256 bits over the same tokens, keyed by the model's layout and the tenant's salt.
    Equal identities mean equal content: outside of the pool there is no content to compare.
    """

    hash: bytes
    identity: bytes
    # The tenant to which the block is charged.
    tenant: str = ""


@functools.lru_cache(maxsize=1024)
def tenant_folder(tenant: str) -> str:
    """Returns 16 hexadecimal digits that stand for a tenant. A tenant's name may contain anything,
    so it never becomes part of a path.
    """
    return hashlib.blake2b(tenant.encode(), digest_size=8, person=b"kvr tenant").hexdigest()


def is_tenant_folder(text: str) -> bool:
    """Whether the text can be a result of `tenant_folder`."""
    return _DIGITS.fullmatch(text) is not None


def is_layout_hash(text: str) -> bool:
    """Whether the text can be the hash of a KV layout: 16 hexadecimal digits."""
    return _DIGITS.fullmatch(text) is not None
