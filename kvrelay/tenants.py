"""Who a request is served for, and what that one may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["client", "admin"]  # who asks for answers; who operates the cluster

CLIENT: frozenset[Role] = frozenset({"client"})
ADMIN: frozenset[Role] = frozenset({"admin"})
ANY_ROLE: frozenset[Role] = CLIENT | ADMIN


@dataclass(frozen=True, slots=True)
class Tenant:
    """As the tokens file describes it. None is no limit; limits per minute hold on each router by itself."""

    name: str = ""
    roles: frozenset[Role] = CLIENT
    weight: float = 1.0  # share of the queue beside other tenants that wait
    max_running: int | None = None  # requests that have workers at one time
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers together
    min_priority: int | None = None  # the most urgent that it may ask for: lower goes first, before all other tenants'
    salt: str = ""  # of its prefix-cache keys; no two tenants have one in common

    def scoped(self, request_id: str) -> str:
        """Unique among all tenants' requests; a tenant's name has no slash."""
        return f"{self.name}/{request_id}" if self.name else request_id

    def unscoped(self, request_id: str) -> str:
        """As the tenant itself calls the request."""
        return request_id.removeprefix(f"{self.name}/") if self.name else request_id


ANONYMOUS = Tenant(roles=ANY_ROLE)  # everybody, where there is no tokens file
