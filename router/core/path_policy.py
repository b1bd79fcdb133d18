"""Choice of workers and path for a request: a pure function that returns its reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvrelay.config.model_sections import PolicyName, RouterConfig
from kvrelay.tenants import Tenant
from kvrelay.types.requests import Path
from kvrelay.types.workers import UNKNOWN_MODEL, ModelVersion
from kvrelay.worker_messages import PrefixSource
from router.core.path_prediction import (
    Better,
    Outlook,
    better_than_delaying,
    better_than_waiting,
    mean_prompt_rate,
    prompt_seconds,
)
from router.core.worker_view import WorkerView

Reason = Literal[
    "short_prompt",
    "dropped_tokens",
    "no_prefill_worker",
    "slo_ttft",
    "slo_itl",
    "prefix_hit",
    "least_loaded",
    "round_robin",
]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The chosen workers and path for one attempt, with the reason."""

    path: Path
    decode: str
    # Empty on the local path.
    prefill: str
    reason: Reason
    # The reason as a sentence. It has figures of this request only.
    why: str
    # Number of tokens that the prefill is predicted to compute.
    uncached_tokens: int
    # Another worker that holds more of the prompt than the prefill worker.
    source: PrefixSource | None = None
    # Figures of other requests that explain the reason.
    load: str = ""
    # Model version of all workers of the assignment.
    model: ModelVersion = UNKNOWN_MODEL
    # Prompt tokens that are predicted to need no computing.
    cached_tokens: int = 0
    # What the prediction missed, once that is known.
    missed: str = ""

    @property
    def own_why(self) -> str:
        """The reason with figures of this request only."""
        return self._why(with_load=False)

    def why_for(self, viewer: Tenant) -> str:
        """Returns the reason that the viewer may read. `load` would reveal other tenants' prompts,
        so only viewers of the whole cluster see it.
        """
        return self._why(with_load=viewer.sees_cluster)

    def _why(self, *, with_load: bool) -> str:
        why = f"{self.why}, {self.load}" if self.load and with_load else self.why
        return f"{why}; {self.missed}" if self.missed else why


@dataclass(frozen=True, slots=True)
class Wait:
    """No placement is possible now, with the reason."""

    why: str
    # True if no worker is ready; False if the ready workers are full.
    no_worker: bool = False
    # True if a decode worker has room, and the prefill workers are busy.
    for_prefill: bool = False


def assign(
    workers: Sequence[WorkerView],
    num_tokens: int,
    avoid: frozenset[str],
    config: RouterConfig,
    broken: frozenset[tuple[str, str]] = frozenset(),
    model: ModelVersion | None = None,
    outlook: Outlook | None = None,
    *,
    drops_tokens: bool = False,
    has_answer: bool = False,
) -> Assignment | Wait:
    """Chooses workers for a sequence of `num_tokens` among workers that accept requests.
    `has_answer`: whether tokens of its answer are among them, because a worker failed after them.

    A prompt with fewer than `local_below_tokens` uncached tokens takes the local path, and a longer
    one the disaggregated path. With an `outlook`, a request takes the other path if that is
    predicted to keep more requests within the SLO.

    - All workers of an assignment serve the same model version: `model` if given, because the
      sequence has tokens of that version. If there are several versions, decode workers of a
      version with a prefill worker are preferred.
    - A sequence that `drops_tokens` takes the local path: only a decode worker drops the same
      tokens of its KV again.
    - Workers in `avoid` failed this request before. They are a last resort.
    - Sick decode workers are used only if all decode workers are sick. Sick prefill workers are
      never used, since the decode pool can prefill.
    - A pair (prefill, decode) in `broken` is never used, because its hand-offs fail.
    """
    if model is not None:
        workers = [one for one in workers if one.model.is_same(model)]
    decoders = [one for one in workers if one.pool == "decode"]
    decoders = [one for one in decoders if not one.sick] or decoders
    if not decoders:
        return Wait("no decode worker is ready", no_worker=True)
    cost = _DECODE_COST[config.policy](num_tokens)
    decode = _choose(_with_prefill(decoders, workers), avoid, cost) or _choose(
        decoders, avoid, cost
    )
    if decode is None:
        return Wait(f"all {len(decoders)} decode workers are full")

    if drops_tokens:
        why = f"{decode.worker_id} drops the same tokens of its KV as the worker before"
        return _local(decode, num_tokens, "dropped_tokens", why)
    uncached = num_tokens - decode.cached_tokens
    part = "prompt and answer" if has_answer else "prompt"
    alike = [one for one in workers if one.model.is_same(decode.model)]
    ready = [one for one in alike if one.pool == "prefill"]
    prefillers = [
        one
        for one in ready
        if not one.sick
        and one.windows == decode.windows
        and (one.worker_id, decode.worker_id) not in broken
    ]
    better = None
    if uncached < config.local_below_tokens:
        if outlook is not None and prefillers:
            better = better_than_delaying(decode, prefillers, num_tokens, outlook)
        if better is None:
            tokens = "token is" if uncached == 1 else "tokens are"
            why = (
                f"{uncached} uncached {part} {tokens} below "
                f"local_below_tokens={config.local_below_tokens}"
            )
            return _local(decode, num_tokens, "short_prompt", why)
    elif not prefillers:
        why = "no prefill worker is ready"
        if ready:
            why = (
                f"none of {len(ready)} prefill workers is fit and can hand over to "
                f"{decode.worker_id}"
            )
        return _local(decode, num_tokens, "no_prefill_worker", why)
    elif outlook is not None:
        helpers = [
            one
            for one in decoders
            if one.worker_id not in avoid and one.model.is_same(decode.model)
        ]
        better = better_than_waiting(helpers, prefillers, num_tokens, outlook)
        if better is not None and better.helper is not None:
            why = f"{better.helper.worker_id} prefills it within slo.itl_ms, because prefill "
            why += "workers are predicted to take more than half of slo.ttft_ms"
            return _local(better.helper, num_tokens, "slo_ttft", why, _figures(better))

    prefill = _choose(
        prefillers,
        avoid,
        _prefill_cost(config.policy, prefillers, num_tokens),
        decode.host_id if config.policy == "kv_aware" else "",
    )
    if prefill is None:
        return Wait(f"all {len(prefillers)} prefill workers are busy", for_prefill=True)
    reason, why, load = _explain(prefill, f"{num_tokens} {part} tokens", config.policy)
    if reason == "least_loaded":
        # It says which worker, but not why there.
        why = (
            f"{uncached} uncached {part} tokens are at least "
            f"local_below_tokens={config.local_below_tokens}; {why}"
        )
    if better is not None:
        reason, load = "slo_itl", _figures(better)
        why = f"on {decode.worker_id} it is predicted to miss slo.ttft_ms or slo.itl_ms"
    best = _source(prefill, [one for one in alike if one.model.is_same(prefill.model)])
    cached, source = prefill.cached_tokens, None
    if best is not None:
        cached = best.stored_tokens
        verb = "holds" if best.exact else "should hold"
        why += f"; {best.worker_id} {verb} {cached} of its {num_tokens} tokens"
        source = PrefixSource(best.worker_id, best.address, cached)
    uncached = num_tokens - cached
    version = decode.model if decode.model.full else prefill.model
    return Assignment(
        "disaggregated",
        decode.worker_id,
        prefill.worker_id,
        reason,
        why,
        uncached,
        source,
        load,
        model=version,
        cached_tokens=cached,
    )


def _local(
    decode: WorkerView, num_tokens: int, reason: Reason, why: str, load: str = ""
) -> Assignment:
    uncached = num_tokens - decode.cached_tokens
    return Assignment(
        "local",
        decode.worker_id,
        "",
        reason,
        why,
        uncached,
        load=load,
        model=decode.model,
        cached_tokens=decode.cached_tokens,
    )


def _figures(better: Better) -> str:
    after, before = (f"{1000 * seconds:,.0f} ms" for seconds in (better.after_s, better.before_s))
    if not math.isfinite(better.before_s):
        return f"predicted TTFT {after}"
    compared = "on both paths" if after == before else f"instead of {before}"
    return f"predicted TTFT {after} {compared}"


def _with_prefill(
    decoders: Sequence[WorkerView], workers: Sequence[WorkerView]
) -> Sequence[WorkerView]:
    """Returns the decode workers whose model version has a prefill worker with room, or else those
    with any prefill worker. Returns all decode workers if there is only one version.
    """
    if len({one.model for one in workers}) == 1:
        return decoders
    fit = [one for one in workers if one.pool == "prefill" and not one.sick]
    versions = {one.model for one in [one for one in fit if not one.full] or fit}
    return [one for one in decoders if any(one.model.is_same(version) for version in versions)]


def _source(prefill: WorkerView, workers: Sequence[WorkerView]) -> WorkerView | None:
    """Returns the worker that holds most of the prompt, if it holds at least one block more than
    the prefill worker will. Among equals, a worker on the same host wins.

    Blocks are identified by a hash of their content, so only workers with the same block size
    count.
    """
    if prefill.windows:
        # Blocks that lack the KV of some layers are not fetched.
        return None
    alike = [
        one
        for one in workers
        if one.block_size == prefill.block_size and one.worker_id != prefill.worker_id
    ]
    best = max(
        alike,
        key=lambda one: (one.stored_tokens, one.host_id == prefill.host_id),
        default=prefill,
    )
    missing = best.stored_tokens - prefill.cached_tokens
    return None if missing < max(1, prefill.block_size) else best


Cost = Callable[[WorkerView], float]


def _choose(
    workers: Sequence[WorkerView], avoid: frozenset[str], cost: Cost, host_id: str = ""
) -> WorkerView | None:
    """Returns the cheapest worker with room. Among equals, a worker on the given host wins, and
    then the least recently assigned worker.
    """
    with_room = [one for one in workers if not one.full]
    candidates = [one for one in with_room if one.worker_id not in avoid] or with_room

    def order(one: WorkerView) -> tuple[float, bool, int]:
        return cost(one), bool(host_id) and one.host_id != host_id, one.last_assigned

    return min(candidates, key=order, default=None)


def _prefill_cost(policy: PolicyName, prefillers: Sequence[WorkerView], num_tokens: int) -> Cost:
    """Cost in seconds until the worker has computed the prompt, or in tokens while no rate is
    known.
    """
    mean = mean_prompt_rate(prefillers) or 1.0
    match policy:
        case "round_robin":
            return lambda _worker: 0
        case "least_loaded":
            return lambda worker: worker.queued_tokens / (worker.prompt_rate or mean)
        case "kv_aware":
            return lambda worker: prompt_seconds(worker, num_tokens, mean)


# Costs of decoding, in tokens of KV that each step reads.
_DECODE_COST: dict[PolicyName, Callable[[int], Cost]] = {
    "round_robin": lambda _num_tokens: lambda _worker: 0,
    "least_loaded": lambda _num_tokens: lambda worker: worker.held_tokens,
    "kv_aware": lambda num_tokens: (
        lambda worker: worker.held_tokens + num_tokens - worker.cached_tokens
    ),
}


def _explain(prefill: WorkerView, tokens: str, policy: PolicyName) -> tuple[Reason, str, str]:
    name = prefill.worker_id
    if policy == "round_robin":
        return "round_robin", f"it is {name}'s turn", ""
    if policy == "kv_aware" and prefill.cached_tokens:
        return (
            "prefix_hit",
            f"{name} {prefill.holds} {prefill.cached_tokens} of {tokens}",
            "",
        )
    return "least_loaded", f"{name} is free first", f"{prefill.queued_tokens} tokens queued"
