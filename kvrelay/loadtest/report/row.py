"""What became of one request."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.types import Ledger

# A router's reason for the local path that is as it should be: too little of the prompt is uncached
# to hand it off.
_SHORT_OR_CACHED = "local_below_tokens"


@dataclass(frozen=True, slots=True)
class Row:
    """Times count from the scheduled arrival, so that a late start counts as latency too."""

    scheduled_s: float  # after the test's start; in a closed loop, when the request's slot was free
    late_s: float  # scheduled arrival to the client's call
    ttft_s: float | None = None
    itl_s: tuple[float, ...] = ()  # between responses with tokens
    e2e_s: float | None = None  # to the last token, or to the failure
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = ""
    path: str = ""
    why: str = ""
    error: str = ""  # name of the status code; empty if the request was answered
    message: str = ""
    request_id: str = ""
    ledger: Ledger | None = None  # of a target that keeps one
    index: int = 0  # in the plan

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1); None for fewer than two tokens."""
        if self.ttft_s is None or self.e2e_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def second_token_gap_s(self) -> float | None:
        return self.itl_s[0] if self.itl_s else None

    @property
    def should_have_been_disaggregated(self) -> bool:
        """It went local although its prompt was neither short nor cached: for want of prefill
        workers.
        """
        return self.path == "local" and _SHORT_OR_CACHED not in self.why
