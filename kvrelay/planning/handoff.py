"""The hand-off of a prompt's KV: bytes, time, and the part that chunked prefill hides. Pure.

Source of the overlap: Patel et al., "Splitwise" (2024), section IV.C; Zhong et al., "DistServe"
(2024), section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrelay.planning.kv_size import KvSize
from kvrelay.planning.roofline import Roofline

# Chunks of a prompt that are followed one by one.
_MAX_CHUNKS = 256


@dataclass(frozen=True, slots=True)
class Handoff:
    """The hand-off of one prompt. Seconds."""

    tokens: int
    num_bytes: float
    # Of the transfer alone.
    transfer_s: float
    prefill_s: float
    # From the end of the prefill to the end of the transfer.
    exposed_s: float

    @property
    def hidden_share(self) -> float:
        """Share of the transfer that runs while the prompt is computed."""
        # Sums of times may differ in the last digit.
        return max(0.0, 1.0 - self.exposed_s / self.transfer_s) if self.transfer_s else 1.0


def hand_off(
    roofline: Roofline, kv: KvSize, tokens: int, chunk_tokens: int, rate: float
) -> Handoff:
    """Returns the hand-off of a prompt over a link of `rate` bytes per second. Each chunk leaves
    when it is computed, while the next one is computed.
    """
    chunk = max(chunk_tokens, -(-tokens // _MAX_CHUNKS))
    computed = sent = sent_bytes = 0.0
    done = 0
    # A prompt is sent before tokens are dropped, and KV of layers with windows for the last tokens
    # only.
    kv = replace(kv, budget_tokens=0)
    behind = max(0, tokens - kv.longest_window)
    windowed = kv.sequence_bytes(tokens) - kv.bytes_per_old_token * tokens
    per_windowed = windowed / (tokens - behind) if tokens > behind else 0.0
    while done < tokens:
        size = min(chunk, tokens - done)
        computed += roofline.prefill_s(size, done)
        done += size
        new = kv.bytes_per_old_token * size + per_windowed * min(size, max(0, done - behind))
        sent_bytes += new
        sent = max(computed, sent) + new / rate
    return Handoff(tokens, sent_bytes, sent_bytes / rate, computed, sent - computed)
