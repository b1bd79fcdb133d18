"""A request that was let in: checked, tokenized, with a seed."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.tenants import ANONYMOUS, Tenant
from kvrelay.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """Times are monotonic seconds of the router's clock."""

    request_id: str  # of the cluster: a tenant's own ids are scoped to it
    token_ids: tuple[int, ...]  # the prompt
    sampling: SamplingParams  # seed is set
    arrival: float
    deadline: float
    priority: int = 0  # lower goes first
    resume: tuple[int, ...] = ()  # tokens of the answer that the client already has
    complete: FinishReason | None = None  # why `resume` is the whole answer, if it is
    tenant: Tenant = ANONYMOUS
    chat: bool = False  # whether it came as messages
    traceparent: str = ""  # of the client's span, as W3C Trace Context writes it; not validated

    @property
    def salt(self) -> str:
        """Of its prefix-cache keys."""
        return self.tenant.salt

    @property
    def client_id(self) -> str:
        """What the client calls it."""
        return self.tenant.unscoped(self.request_id)

    @property
    def most_tokens(self) -> int:
        """Of the prompt and of what may still come of the answer."""
        return len(self.token_ids) + self.sampling.max_tokens - len(self.resume)
