"""A request that was let in: checked, tokenized, with a seed."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.tenants import ANONYMOUS, Tenant
from kvrelay.types import FinishReason, ModelVersion, SamplingParams


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
    model: ModelVersion | None = None  # that gave the tokens of `resume`, where the client says
    traceparent: str = ""  # of the client's span, as W3C Trace Context writes it; not validated
    cache_salt: str | None = field(default=None, repr=False)  # the client's own

    @property
    def salt(self) -> str:
        """Of its prefix-cache keys, in each attempt."""
        return self.tenant.salt_for(self.cache_salt)

    @property
    def client_id(self) -> str:
        """What the client calls it."""
        return self.tenant.unscoped(self.request_id)

    @property
    def most_tokens(self) -> int:
        """Of the prompt and the answer. Tokens that the client has already are computed again, so
        they count.
        """
        return len(self.token_ids) + self.sampling.max_tokens
