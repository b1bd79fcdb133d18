"""Tenants: the owners of requests, and their limits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

# client sends requests. monitor reads the metrics of the whole cluster. admin operates the cluster
# and reads its metrics too.
Role = Literal["client", "monitor", "admin"]

CLIENT: frozenset[Role] = frozenset({"client"})
ADMIN: frozenset[Role] = frozenset({"admin"})
MONITOR: frozenset[Role] = frozenset({"monitor", "admin"})
ANY_ROLE: frozenset[Role] = CLIENT | MONITOR


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant, as the tokens file describes it. None means no limit. Limits per minute apply on
    each router separately.
    """

    name: str = ""
    roles: frozenset[Role] = CLIENT
    # Share of the queue and of the batch, relative to other waiting tenants.
    weight: float = 1.0
    # Most requests that have workers at the same time.
    max_running: int | None = None
    requests_per_minute: int | None = None
    # Tokens of prompts and answers together.
    tokens_per_minute: int | None = None
    # Most tokens of thinking in one answer.
    max_reasoning_tokens: int | None = None
    # The most urgent priority that the tenant may request. Lower values run first, before those of
    # all other tenants.
    min_priority: int | None = None
    # Salt of the tenant's prefix-cache keys; different for each tenant.
    salt: str = ""

    @property
    def sees_cluster(self) -> bool:
        """Whether the tenant may read metrics that include other tenants' requests."""
        return bool(self.roles & MONITOR)

    def salt_for(self, cache_salt: str | None) -> str:
        """Returns the salt of a request's prefix-cache keys.

        With a `cache_salt`, this is its BLAKE2b, keyed by the tenant's own salt. So for any value
        from a client, the result differs from the salts of other tenants and of requests without a
        cache_salt.
        """
        if cache_salt is None:
            return self.salt
        key = hashlib.sha256(self.salt.encode()).digest()
        digest = hashlib.blake2b(
            cache_salt.encode(), key=key, digest_size=32, person=b"kvr cache_salt"
        )
        return digest.hexdigest()

    def scoped(self, request_id: str) -> str:
        """Returns a request id that is unique among all tenants. Tenant names contain no slash."""
        return f"{self.name}/{request_id}" if self.name else request_id

    def unscoped(self, request_id: str) -> str:
        """Returns the request id as the tenant knows it."""
        return request_id.removeprefix(f"{self.name}/") if self.name else request_id


# The tenant of all requests if there is no tokens file.
ANONYMOUS = Tenant(roles=ANY_ROLE)
