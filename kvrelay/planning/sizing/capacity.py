"""Contexts and users that fit, and the point where the decode latency limits them. Pure.

Source: bytes free for KV over users and bytes per token; Kwon et al., "Efficient Memory Management
for Large Language Model Serving with PagedAttention" (2023), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.errors import FailedPrecondition
from kvrelay.planning.kv_size import KvSize
from kvrelay.planning.quantity import decimal_bytes
from kvrelay.planning.roofline import Roofline

# No figure of users or tokens is larger.
MOST = 10**12


def free_bytes(memory: float, weights: float, activations: float) -> float:
    """Returns the bytes that are left for KV. Raises FailedPrecondition if there are none."""
    free = memory - weights - activations
    if free <= 0:
        raise FailedPrecondition(
            f"the model does not fit: {decimal_bytes(weights)} of weights and "
            f"{decimal_bytes(activations)} of activations exceed {decimal_bytes(memory)} of usable "
            "memory; use more or larger devices, or weights of fewer bits"
        )
    return free


def longest_context(kv: KvSize, free: float, users: int) -> int:
    """Returns the most tokens that each of `users` sequences can have; MOST if only windows and
    states bound a sequence.
    """
    return int(min(MOST, kv.tokens_in(free / users) + 1e-9))


def most_users(kv: KvSize, free: float, context: int) -> int:
    """Returns the most sequences of `context` tokens that fit; MOST without any KV."""
    each = kv.sequence_bytes(context)
    return int(min(MOST, free / each + 1e-9)) if each else MOST


def latency_context(roofline: Roofline, users: int, itl_s: float) -> int:
    """Returns the most tokens of each of `users` sequences with which a decode step takes at most
    `itl_s`; 0 if it takes longer without any.
    """
    return _largest(lambda tokens: roofline.decode_s(users, users * tokens) <= itl_s)


def latency_users(roofline: Roofline, context: int, itl_s: float) -> int:
    """Returns the most sequences of `context` tokens with which a decode step takes at most
    `itl_s`.
    """
    return _largest(lambda users: roofline.decode_s(users, users * context) <= itl_s)


def _largest(holds: Callable[[int], bool]) -> int:
    """Returns the largest number up to MOST for which a condition holds that fails for all larger
    ones; 0 if there is none.
    """
    if not holds(1):
        return 0
    low, high = 1, 2
    while high < MOST and holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return min(low, MOST)


@dataclass(frozen=True, slots=True)
class Wall:
    """What bounds the context of a number of users."""

    users: int
    # Tokens per user that memory, the ITL, and the model allow. The model's is 0 if unknown.
    by_memory: int
    by_latency: int
    by_model: int

    @property
    def context(self) -> int:
        """Tokens per user that all allow."""
        limits = [self.by_memory, self.by_latency]
        return min([*limits, self.by_model] if self.by_model else limits)

    @property
    def limit(self) -> str:
        """Names the tightest limit: memory, latency or model."""
        found = {"memory": self.by_memory, "latency": self.by_latency}
        if self.by_model:
            found["model"] = self.by_model
        return min(found, key=lambda name: found[name])


def step_of_full_memory_s(roofline: Roofline, used: float) -> float:
    """Returns the seconds in which a step reads `used` bytes: all weights and KV of a full
    memory.
    """
    return used / roofline.bytes_per_s if used < math.inf else math.inf
