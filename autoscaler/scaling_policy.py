"""Scaling policy: the Kubernetes HPA's formulas and stabilisation windows over kvrelay's metrics.

https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#algorithm-details
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvrelay.config.autoscaling_policy import MetricName, MetricTarget, PoolPolicy
from kvrelay.config.section import MAX_POOL
from kvrelay.planning.quantity import plain

_TOTALS = ("queue_depth", "queue_tokens")
# Highest busy share that the same load may cause in a smaller pool.
BUSY_AT_MOST = 0.7
# Absorbs rounding errors: 2.1 / 0.7 must not round up to 4 workers.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The size that a pool needs for the requests to come, with its reason."""

    size: int
    reason: str
    # The size for a load that is larger by the policy's tolerance. Sizes up to it stay as they are.
    most: int = 0


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A pool at one moment. `metrics` lacks unknown values; `queue_*` are totals over the pool."""

    # Wanted number of workers.
    size: int
    # Number of workers that report the metrics.
    ready: int
    metrics: Mapping[MetricName, float] = field(default_factory=dict)
    # Mean busy share of those workers, 0 to 1. None: unknown.
    busy_share: float | None = None
    # The answer of the metric slo. None: unknown.
    foreseen: Foreseen | None = None
    # Requests wait while the pool is empty.
    is_needed: bool = False


@dataclass(frozen=True, slots=True)
class PoolState:
    """The policy's state since `size` was set: (start time, recommended size) pairs, oldest
    first.
    """

    size: int
    recommendations: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The size to set, with its reason. `delayed`: the size that the metrics ask for, if a delay
    holds it back.
    """

    desired: int
    reason: str
    delayed: int | None = None


def decide(
    snapshot: PoolSnapshot, policy: PoolPolicy, state: PoolState | None, now: float
) -> tuple[Decision, PoolState]:
    """Returns the size to set at `now` (monotonic seconds), with its reason, and the state for the
    next call.

    - Growth: the recommendation must have been above the size for `upscale_delay_s`. The lowest
      recommendation of that time counts.
    - Shrinking: the same with `downscale_delay_s` and the highest recommendation.
    - A needed pool that is empty grows at once.
    - A change of the size, by the policy or an operator, restarts both windows. So a pool grows by
      at most `max_step_up` per `upscale_delay_s`.
    - Bounds are enforced at once.
    """
    size = snapshot.size
    recommendation, reason = _recommendation(snapshot, policy)
    if state is None or state.size != size:
        state = PoolState(size, ((-math.inf, size),))
    if state.recommendations[-1][1] != recommendation:
        state = PoolState(size, (*state.recommendations, (now, recommendation)))
    longest = max(policy.upscale_delay_s, policy.downscale_delay_s)
    state = PoolState(size, _since(state.recommendations, now - longest))

    if size < policy.min_replicas:
        return Decision(
            policy.min_replicas, f"{size} is below min_replicas {policy.min_replicas}"
        ), state
    if size > policy.max_replicas:
        return Decision(
            policy.max_replicas, f"{size} is above max_replicas {policy.max_replicas}"
        ), state
    if recommendation > size:
        delay_s = policy.upscale_delay_s if size or not snapshot.is_needed else 0.0
        held = min(
            recommendation for _, recommendation in _since(state.recommendations, now - delay_s)
        )
        limit, delay = size + policy.max_step_up, f"upscale_delay_s {policy.upscale_delay_s:g}"
        desired, step = min(max(held, size), limit), f"+{policy.max_step_up} by max_step_up"
    elif recommendation < size:
        held = highest_recommendation(state, now - policy.downscale_delay_s)
        limit, delay = (
            size - policy.max_step_down,
            f"downscale_delay_s {policy.downscale_delay_s:g}",
        )
        desired, step = max(min(held, size), limit), f"-{policy.max_step_down} by max_step_down"
    else:
        return Decision(size, reason), state
    if desired == size:
        return Decision(size, f"{reason}, not yet for {delay}", recommendation), state
    if held != recommendation:
        reason += f", {held} during {delay}"
    if desired != held:
        reason += f", limited to {step}"
    return Decision(desired, reason), state


def highest_recommendation(state: PoolState, start: float) -> int:
    """Returns the highest recommendation in effect at `start` or later."""
    return max(recommendation for _, recommendation in _since(state.recommendations, start))


def _since(
    recommendations: tuple[tuple[float, int], ...], start: float
) -> tuple[tuple[float, int], ...]:
    """The recommendations in effect at `start` and later."""
    first = max(
        (index for index, (since, _) in enumerate(recommendations) if since <= start), default=0
    )
    return recommendations[first:]


def _recommendation(snapshot: PoolSnapshot, policy: PoolPolicy) -> tuple[int, str]:
    """Returns the size that the metrics ask for, within the policy's bounds. The largest answer
    counts.

    A queue or a latency shows that a pool is too small, but not by how much it is too large: a pool
    that serves well has short queues at any size. So no metric shrinks the pool below `least_size`
    of its load. Without this rule, a pool at constant load would shrink until it is too slow, grow,
    and shrink again.
    """
    answers: list[tuple[int, str]] = []
    unknown: list[str] = []
    for metric in policy.metrics:
        if metric.name == "slo":
            if snapshot.foreseen is None:
                unknown.append(metric.name)
            else:
                answers.append(_foreseen(snapshot.foreseen, snapshot.size, policy.tolerance))
            continue
        value = snapshot.metrics.get(metric.name)
        if (
            value is None
            or not math.isfinite(value)
            or value < 0
            or (metric.name not in _TOTALS and not snapshot.ready)
        ):
            unknown.append(metric.name)
        else:
            answers.append(_answer(metric, value, snapshot, policy.tolerance))
    recommendation, reason = max(
        answers, key=lambda answer: answer[0], default=(snapshot.size, "no metric is known")
    )
    # An unknown metric may be large.
    if unknown and recommendation < snapshot.size:
        recommendation, reason = snapshot.size, f"{reason}, but not known: {', '.join(unknown)}"
    if recommendation < snapshot.size and snapshot.busy_share is not None:
        busy = max(0.0, min(1.0, snapshot.busy_share))
        needed = least_size(snapshot.ready * busy)
        if needed > recommendation:
            recommendation = min(needed, snapshot.size)
            reason += (
                f", but {snapshot.busy_share:.0%} of {snapshot.ready} is busy, which takes "
                f"{recommendation}"
            )
    if recommendation > policy.max_replicas:
        return policy.max_replicas, f"{reason}, limited to {policy.max_replicas} by max_replicas"
    if recommendation < policy.min_replicas:
        return policy.min_replicas, f"{reason}, limited to {policy.min_replicas} by min_replicas"
    return recommendation, reason


def _foreseen(foreseen: Foreseen, size: int, tolerance: float) -> tuple[int, str]:
    if foreseen.size < size <= foreseen.most:
        return size, f"{foreseen.reason}; {size} is within tolerance {tolerance:g}"
    return foreseen.size, foreseen.reason


def least_size(load: float) -> int:
    """Returns the least number of workers for the load, in busy workers: the busy share is at most
    BUSY_AT_MOST, and sqrt(load) workers are idle on average.

    Requests arrive at random, so a load of mean x varies by about sqrt(x). A small pool therefore
    needs a larger share of idle workers than a large one: square-root staffing, W. Whitt,
    "Understanding the efficiency of multi-server service systems", Management Science 38 (1992).
    """
    return math.ceil(max(load / BUSY_AT_MOST, load + math.sqrt(load)) - _ROUNDING)


def _answer(
    metric: MetricTarget, value: float, snapshot: PoolSnapshot, tolerance: float
) -> tuple[int, str]:
    """Returns the size for one metric and its explanation: the HPA's AverageValue, ceil(total /
    target), or its Value, ceil(ready workers x value / target).
    """
    assert metric.target is not None, "only slo has none"
    if metric.name in _TOTALS:
        workers, wanted = snapshot.size, value / metric.target
        ratio = wanted / workers if workers else math.inf
    else:
        workers, ratio = snapshot.ready, value / metric.target
        wanted = workers * ratio
    text = (
        f"{metric.name} {plain(value, 4)} over {workers} worker{'s' * (workers != 1)} / target "
        f"{plain(metric.target, 4)}"
    )
    if abs(ratio - 1) <= tolerance + _ROUNDING:
        return snapshot.size, f"{text} is within tolerance {tolerance:g}"
    # The quotient of two allowed values may be infinite.
    size = math.ceil(min(wanted, MAX_POOL) - _ROUNDING)
    if value > 0:
        # What waits needs a worker, however large the target is.
        size = max(size, 1)
    return size, f"{text} → {size}"
