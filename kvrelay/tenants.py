"""Who a request is served for, and what that one may use."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

# Who asks for answers; who reads the figures of the whole cluster; who operates it, and reads them
# too.
Role = Literal["client", "monitor", "admin"]

CLIENT: frozenset[Role] = frozenset({"client"})
ADMIN: frozenset[Role] = frozenset({"admin"})
MONITOR: frozenset[Role] = frozenset({"monitor", "admin"})
ANY_ROLE: frozenset[Role] = CLIENT | MONITOR


@dataclass(frozen=True, slots=True)
class Tenant:
    """As the tokens file describes it. None is no limit; limits per minute hold on each router by
    itself.
    """

    name: str = ""
    roles: frozenset[Role] = CLIENT
    weight: float = 1.0  # share of the queue and of the batch beside other tenants that wait
    max_running: int | None = None  # requests that have workers at one time
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers together
    # The most urgent that it may ask for: lower goes first, before all other tenants'
    min_priority: int | None = None
    salt: str = ""  # of its prefix-cache keys; no two tenants have one in common

    @property
    def sees_cluster(self) -> bool:
        """Whether it may read figures that other tenants' requests have a part in."""
        return bool(self.roles & MONITOR)

    def salt_for(self, cache_salt: str | None) -> str:
        """The salt of a request's prefix-cache keys.

        With a `cache_salt`, BLAKE2b of it, keyed by the tenant's own salt. So whatever a client
        gives, the result is the salt of no other tenant and of no request without a cache_salt.
        """
        if cache_salt is None:
            return self.salt
        key = hashlib.sha256(self.salt.encode()).digest()
        digest = hashlib.blake2b(
            cache_salt.encode(), key=key, digest_size=32, person=b"kvr cache_salt"
        )
        return digest.hexdigest()

    def scoped(self, request_id: str) -> str:
        """Unique among all tenants' requests; a tenant's name has no slash."""
        return f"{self.name}/{request_id}" if self.name else request_id

    def unscoped(self, request_id: str) -> str:
        """As the tenant itself calls the request."""
        return request_id.removeprefix(f"{self.name}/") if self.name else request_id


ANONYMOUS = Tenant(roles=ANY_ROLE)  # everybody, where there is no tokens file
