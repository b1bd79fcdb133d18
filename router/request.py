"""A request that was let in: checked, tokenized, with a seed."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.tenants import ANONYMOUS, Tenant
from kvrelay.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """Times are monotonic seconds of the router's clock."""

    request_id: str
    token_ids: tuple[int, ...]  # the prompt
    sampling: SamplingParams  # seed is set
    arrival: float
    deadline: float
    priority: int = 0  # lower goes first
    resume: tuple[int, ...] = ()  # tokens of the answer that the client already has
    complete: FinishReason | None = None  # why `resume` is the whole answer, if it is
    tenant: Tenant = ANONYMOUS
    salt: str = ""
    chat: bool = False  # whether it came as messages
    traceparent: str = ""  # of the client's span, as W3C Trace Context writes it; not validated
