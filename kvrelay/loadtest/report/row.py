"""The result of one request."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.types.requests import Ledger

# In the router's intended reasons for the local path: the uncached part of the prompt is too short
# to hand off, or prefill workers would take too long.
_INTENDED = ("local_below_tokens", "slo.ttft_ms")


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one request. Times count from the scheduled arrival, so that latencies include
    a late start.
    """

    # Seconds after the start of the test. In a closed loop, the time at which the request's slot
    # became free.
    scheduled_s: float
    # Seconds from the scheduled arrival to the client's call.
    late_s: float
    ttft_s: float | None = None
    # Seconds between consecutive responses with tokens.
    itl_s: tuple[float, ...] = ()
    # Seconds to the last token, or to the failure.
    e2e_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = ""
    path: str = ""
    why: str = ""
    # Name of the status code; empty if the request was answered.
    error: str = ""
    message: str = ""
    request_id: str = ""
    # Set if the target sends a ledger.
    ledger: Ledger | None = None
    # Position in the plan.
    index: int = 0

    @property
    def ok(self) -> bool:
        """Whether the request was answered."""
        return not self.error

    @property
    def tpot_s(self) -> float | None:
        """Time per output token in seconds: (E2E - TTFT) / (tokens - 1). None for fewer than two
        tokens.
        """
        if self.ttft_s is None or self.e2e_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def second_token_gap_s(self) -> float | None:
        """Seconds from the first to the second response with tokens; None if there is no second."""
        return self.itl_s[0] if self.itl_s else None

    @property
    def should_have_been_disaggregated(self) -> bool:
        """Whether the request took the local path although its prompt was neither short nor cached,
        because prefill workers were missing.
        """
        return self.path == "local" and not any(reason in self.why for reason in _INTENDED)
