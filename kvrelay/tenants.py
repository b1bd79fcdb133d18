"""Who a request is served for, and what that one may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """As the tokens file describes it. None is no limit."""

    name: str = ""
    weight: float = 1.0  # share of the queue beside other tenants that wait
    max_running: int | None = None  # requests that have workers at one time
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None  # of prompts and answers together
    cache_share: float = 1.0  # of each worker's prefix cache, at most
    salt: str = ""  # of its prefix-cache keys; no two tenants have one in common


ANONYMOUS = Tenant()  # everybody, where there is no tokens file
