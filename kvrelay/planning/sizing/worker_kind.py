"""A kind of worker: a model on some devices, its step costs and its room for KV. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvrelay.planning.sizing.queueing import erlang_c
from kvrelay.planning.step_cost_model import StepCostModel

# Standard deviations of the batch and of its KV that are kept free: 1 % of a normal distribution
# lies beyond.
SPARE = 2.33
# Sequences of one worker.
MAX_BATCH = 4096


class StepCosts(Protocol):
    """Step times of one worker, in seconds."""

    def prompt_s(self, tokens: int, chunk_tokens: int, before: int = 0) -> float:
        """Returns the time of all prefill steps of a prompt."""
        ...

    def decode_s(self, batch: float, context_tokens: float) -> float:
        """Returns the time of a decode step."""
        ...

    def mixed_s(self, tokens: float, before: float, batch: float, context_tokens: float) -> float:
        """Returns the time of a step that prefills a chunk beside a decode batch."""
        ...

    def handoff_s(self, num_bytes: float) -> float:
        """Returns the time of a hand-off."""
        ...


@dataclass(frozen=True, slots=True)
class FormulaCosts:
    """The costs by the formulas of a `StepCostModel`, with a mixed step."""

    model: StepCostModel

    def prompt_s(self, tokens: int, chunk_tokens: int, before: int = 0) -> float:
        """Returns the time of all prefill steps of a prompt."""
        return self.model.prompt_s(tokens, chunk_tokens, before)

    def decode_s(self, batch: float, context_tokens: float) -> float:
        """Returns the time of a decode step."""
        return self.model.decode_s(batch, context_tokens)

    def mixed_s(self, tokens: float, before: float, batch: float, context_tokens: float) -> float:
        """Returns the time of both steps, without one base: a mixed step reads the weights once."""
        model = self.model
        pairs = tokens * (before + (tokens + 1) / 2)
        prompt = model.prefill_base_s + model.prefill_token_s * tokens
        prompt += model.prefill_token_context_s * pairs
        once = min(model.prefill_base_s, model.decode_base_s)
        return prompt + model.decode_s(batch, context_tokens) - once

    def handoff_s(self, num_bytes: float) -> float:
        """Returns the time of a hand-off."""
        return self.model.handoff_s(num_bytes)


class SequenceKv(Protocol):
    """The KV bytes of a sequence."""

    def sequence_bytes(self, tokens: int | float) -> float:
        """Returns the bytes of a sequence of `tokens` tokens."""
        ...

    def on(self, degree: int) -> SequenceKv:
        """Returns the KV of all of `degree` devices together, copies included."""
        ...


@dataclass(frozen=True, slots=True)
class FlatKv:
    """KV of which every token takes the same bytes, on one device."""

    bytes_per_token: float

    def sequence_bytes(self, tokens: int | float) -> float:
        """Returns the bytes of a sequence of `tokens` tokens."""
        return self.bytes_per_token * tokens

    def on(self, degree: int) -> FlatKv:
        """Returns this KV: there is one device."""
        return self


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """One copy of the model on `degree` devices."""

    degree: int
    costs: StepCosts
    kv: SequenceKv
    # Bytes that all its devices have free for KV.
    kv_room: float

    def fits_batch(self, batch: float, mean: float, spread: float) -> bool:
        """Whether the KV of a batch fits, with room for its variation. mean, spread: tokens of a
        running sequence. The sum over a batch varies with the root of its size.
        """
        tokens = mean + SPARE * spread / batch**0.5 if batch >= 1 else mean + SPARE * spread
        return batch * self.kv.sequence_bytes(tokens) <= self.kv_room

    def memory_batch(self, mean: float, spread: float) -> int:
        """Returns the largest batch whose KV fits."""
        return largest(lambda batch: self.fits_batch(batch, mean, spread), MAX_BATCH)

    def latency_batch(self, mean: float, itl_s: float) -> int:
        """Returns the largest batch whose decode step takes at most `itl_s`."""
        return largest(lambda batch: self.costs.decode_s(batch, batch * mean) <= itl_s, MAX_BATCH)

    def batch_at(self, tokens_per_s: float, mean: float, most: int) -> float | None:
        """Returns the smallest batch at which a worker generates `tokens_per_s`; None if none of
        at most `most` sequences does.
        """
        if tokens_per_s <= 0:
            return 0.0

        best = self.fastest_batch(mean, most)
        if most < 1 or self.throughput(best, mean) < tokens_per_s:
            return None
        low, high = 0.0, best
        for _ in range(50):
            middle = (low + high) / 2
            enough = self.throughput(middle, mean) >= tokens_per_s
            low, high = (low, middle) if enough else (middle, high)
        return high

    def throughput(self, batch: float, mean: float) -> float:
        """Returns the tokens per second of a batch."""
        seconds = self.costs.decode_s(batch, batch * mean)
        return batch / seconds if seconds else math.inf

    def fastest_batch(self, mean: float, most: float) -> float:
        """Returns the batch of at most `most` sequences with the highest throughput."""
        return _highest(lambda batch: self.throughput(batch, mean), most)


def _highest(throughput: Callable[[float], float], most: float) -> float:
    """Returns the batch up to `most` with the highest throughput, which rises with the batch until
    each sequence more costs more than the mean.
    """
    low, high = 0.0, float(most)
    for _ in range(100):
        third = (high - low) / 3
        if throughput(low + third) < throughput(high - third):
            low += third
        else:
            high -= third
    return max(high, float(most), key=throughput)


def slot_wait(slots: int, busy: float, arrival_scv: float) -> float:
    """Returns the probability that an arrival finds no free batch slot.

    Arrivals more variable than Poisson's come in groups of z = (SCV + 1) / 2: Hayward's
    approximation divides slots and load by z (Whitt, "Heavy-Traffic Approximations for Service
    Systems with Blocking", 1984).
    """
    group = max(1.0, (arrival_scv + 1) / 2)
    return erlang_c(int(slots / group), busy / group)


def largest(holds: Callable[[int], bool], most: int) -> int:
    """Returns the largest number from 1 to `most` for which a condition holds that fails for all
    larger ones; 0 if there is none.
    """
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def smallest(holds: Callable[[int], bool], least: int, most: int) -> int | None:
    """Returns the smallest number from `least` to `most` for which a condition holds that holds for
    all larger ones; None if there is none.
    """
    step, high = 1, least
    while not holds(high):
        if high >= most:
            return None
        high = min(most, high + step)
        step *= 2
    low = least - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
