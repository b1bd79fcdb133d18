"""Single-purpose permissions to move KV. A capability is a MAC over a grant; only the granting side
can compute it.

A certificate proves that its holder is a worker. A capability proves that this worker may write
this request's KV to the blocks of this lease, or read the beginning of this request's KV. So a
faulty worker cannot reach blocks that no router has assigned to it. Without TLS, neither can
another process of the host.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import astuple, dataclass

from kvrelay.errors import PermissionDenied

KEY_BYTES = 32
_MAC_BYTES = 16


@dataclass(frozen=True, slots=True)
class PushGrant:
    """Permission for a worker to push one request's KV to a lease of another worker. All numbers
    are those of the lease when it was granted.
    """

    request_id: str
    attempt: int
    # Worker id.
    sender: str
    # Worker id.
    receiver: str
    lease_id: int
    epoch: int
    generation: int
    num_blocks: int
    # A duration, because clocks differ. The lease table knows when the lease ends.
    seconds: float


@dataclass(frozen=True, slots=True)
class FetchGrant:
    """Permission for a worker to have the beginning of one request's KV pushed to its address from
    another worker's prefix cache.
    """

    request_id: str
    attempt: int
    # Worker id.
    borrower: str
    # Address of the borrower.
    address: str
    # Worker id.
    lender: str
    # Epoch of the lender.
    epoch: int
    # Most tokens, from the start of the request.
    tokens: int


Grant = PushGrant | FetchGrant


def make_key() -> bytes:
    """Returns a secret for one incarnation of a worker. The capabilities of earlier incarnations
    become invalid.
    """
    return secrets.token_bytes(KEY_BYTES)


def make_capability(key: bytes, grant: Grant) -> str:
    """Returns the keyed BLAKE2b (RFC 7693), in hex, over the kind of the grant and its fields. Each
    value is preceded by its length.
    """
    mac = hashlib.blake2b(key=key, digest_size=_MAC_BYTES)
    for value in (type(grant).__name__, *astuple(grant)):
        data = str(value).encode()
        mac.update(len(data).to_bytes(8, "little"))
        mac.update(data)
    return mac.hexdigest()


def check_capability(key: bytes, grant: Grant, shown: str) -> None:
    """Raises PermissionDenied for a wrong capability. The comparison takes constant time."""
    if not hmac.compare_digest(make_capability(key, grant).encode(), shown.encode()):
        raise PermissionDenied(
            f"the capability does not match this {type(grant).__name__} of request "
            f"{grant.request_id!r:.80}; it must come from the router of that request"
        )
