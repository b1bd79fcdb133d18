"""Leave to move KV, once and for one purpose: what is granted, and a MAC over it that only the
granting side can make.

A certificate says that its holder is a worker. A capability says that this worker may write this
request's KV to the blocks of this lease, or read the beginning of this request's KV. So neither a
worker gone wrong nor, where there is no TLS, another process of the host reaches blocks that no
router has assigned to it.
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
    """A worker may push one request's KV to another's lease. All numbers are those of the lease
    when it was granted.
    """

    request_id: str
    attempt: int
    sender: str  # worker id
    receiver: str  # worker id
    lease_id: int
    epoch: int
    generation: int
    num_blocks: int
    seconds: float  # a duration, since clocks differ; the lease table knows when it ends


@dataclass(frozen=True, slots=True)
class FetchGrant:
    """A worker may have the beginning of one request's KV pushed to its address from another's
    prefix cache.
    """

    request_id: str
    attempt: int
    borrower: str  # worker id
    address: str  # of the borrower
    lender: str  # worker id
    epoch: int  # of the lender
    tokens: int  # from the request's start, at most


Grant = PushGrant | FetchGrant


def make_key() -> bytes:
    """A secret for one incarnation of a worker: what an earlier one granted is worth nothing."""
    return secrets.token_bytes(KEY_BYTES)


def make_capability(key: bytes, grant: Grant) -> str:
    """Keyed BLAKE2b (RFC 7693), in hex, over the kind of grant and its fields, each with its length
    before it.
    """
    mac = hashlib.blake2b(key=key, digest_size=_MAC_BYTES)
    for value in (type(grant).__name__, *astuple(grant)):
        data = str(value).encode()
        mac.update(len(data).to_bytes(8, "little"))
        mac.update(data)
    return mac.hexdigest()


def check_capability(key: bytes, grant: Grant, shown: str) -> None:
    """Takes the same time whatever is wrong. Raises PermissionDenied."""
    if not hmac.compare_digest(make_capability(key, grant).encode(), shown.encode()):
        raise PermissionDenied(
            f"the capability is not one for this {type(grant).__name__} of request "
            f"{grant.request_id!r:.80}; a router gives each worker that of its own lease"
        )
