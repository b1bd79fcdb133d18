"""An admitted request: validated, tokenized, with a seed."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.tenants import ANONYMOUS, Tenant
from kvrelay.types.requests import FinishReason, SamplingParams, Slo, ThinkingMarkers
from kvrelay.types.workers import ModelVersion


@dataclass(frozen=True, slots=True)
class Request:
    """An admitted request. Times are monotonic seconds of the router's clock."""

    # Unique in the cluster: a client's own id is scoped to its tenant.
    request_id: str
    # The prompt.
    token_ids: tuple[int, ...]
    # The seed is set.
    sampling: SamplingParams
    arrival: float
    deadline: float
    # Lower goes first.
    priority: int = 0
    # Tokens of the answer that the client already has.
    resume: tuple[int, ...] = ()
    # Finish reason if `resume` is the complete answer, else None.
    complete: FinishReason | None = None
    tenant: Tenant = ANONYMOUS
    # True if the request came as messages.
    chat: bool = False
    # Model version that gave the tokens of `resume`, if the client names it.
    model: ModelVersion | None = None
    # The client's span as a W3C Trace Context value, not validated.
    traceparent: str = ""
    # Salt chosen by the client.
    cache_salt: str | None = field(default=None, repr=False)
    slo: Slo = field(default_factory=Slo)
    # True if the client did not set max_tokens, so that it does not tell the answer's length.
    open_ended: bool = False
    # Hash of the adapter's files; empty for the base model. The same in each attempt.
    adapter: str = ""
    # The tokens around the thinking in the answer; None if the model has no such tokens.
    thinking: ThinkingMarkers | None = None

    @property
    def salt(self) -> str:
        """Salt of the request's prefix cache keys, the same in each attempt."""
        return self.tenant.salt_for(self.cache_salt)

    @property
    def client_id(self) -> str:
        """The client's own request id."""
        return self.tenant.unscoped(self.request_id)

    @property
    def planned_tokens(self) -> int | None:
        """The client's bound on the tokens of the answer; None without one."""
        return None if self.open_ended else self.sampling.max_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether the first attempts compute the logprobs of the prompt, which no cached KV has."""
        return self.sampling.prompt_logprobs is not None and not self.resume

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of prompt and answer. It includes the tokens that the client
        already has, because they are computed again.
        """
        return len(self.token_ids) + self.sampling.max_tokens
