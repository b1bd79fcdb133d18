"""Which workers serve a request, and by which path: a pure function that also says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvrelay.config.schema import PolicyName, RouterConfig
from kvrelay.messages import PrefixSource
from kvrelay.tenants import Tenant
from kvrelay.types import UNKNOWN_MODEL, ModelVersion, Path, PoolName

Reason = Literal["short_prompt", "no_prefill_worker", "prefix_hit", "least_loaded", "round_robin"]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as one request sees it. Counts are of this router's own requests."""

    worker_id: str
    pool: PoolName
    full: bool = False  # it refused lately, or its sequences take all the room that it has
    queued_tokens: int = 0  # prefill: prompt tokens given to it and not yet computed
    held_tokens: int = 0  # decode: tokens of the sequences that it holds
    cached_tokens: int = 0  # of this request's tokens, those that its prefix cache probably holds
    last_assigned: int = 0  # grows with each assignment
    address: str = ""
    block_size: int = 0
    sick: bool = False  # it fails, or is much slower than the others of its pool
    model: ModelVersion = UNKNOWN_MODEL


@dataclass(frozen=True, slots=True)
class Assignment:
    path: Path
    decode: str
    prefill: str  # empty on the local path
    reason: Reason
    why: str  # the reason as a sentence, with figures of this request alone
    uncached_tokens: int  # that the prefill has to compute
    source: PrefixSource | None = None  # who holds more of the prompt than the prefill worker does
    load: str = ""  # figures of other requests that the reason rests on
    model: ModelVersion = UNKNOWN_MODEL  # that all workers of the assignment serve

    def why_for(self, viewer: Tenant) -> str:
        """The reason as the viewer may read it: `load` would tell one tenant of another's
        prompts.
        """
        return f"{self.why}, {self.load}" if self.load and viewer.sees_cluster else self.why


@dataclass(frozen=True, slots=True)
class Wait:
    why: str
    no_worker: bool = False  # there is none, as against none with room


def assign(
    workers: Sequence[WorkerView],
    num_tokens: int,
    avoid: frozenset[str],
    config: RouterConfig,
    broken: frozenset[tuple[str, str]] = frozenset(),
    model: ModelVersion | None = None,
) -> Assignment | Wait:
    """Chooses workers for a sequence of `num_tokens` among those that take new work.

    All workers of an assignment serve one version of the model: `model`, whose tokens the sequence
    has, if that is given. While there are several, decode workers of a version that has a prefill
    worker come first.

    Workers in `avoid` failed this request before: they are taken only if there is no other. Sick
    decode workers are taken only if all are; sick prefill workers never, since then the decode pool
    prefills. Nor is a pair (prefill, decode) in `broken`, whose hand-offs fail.
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

    uncached = num_tokens - decode.cached_tokens
    if uncached < config.local_below_tokens:
        why = (
            f"{uncached} uncached prompt tokens are below "
            f"local_below_tokens={config.local_below_tokens}"
        )
        return Assignment(
            "local", decode.worker_id, "", "short_prompt", why, uncached, model=decode.model
        )
    workers = [one for one in workers if one.model.is_same(decode.model)]
    ready = [one for one in workers if one.pool == "prefill"]
    prefillers = [
        one for one in ready if not one.sick and (one.worker_id, decode.worker_id) not in broken
    ]
    if not prefillers:
        why = "no prefill worker is ready"
        if ready:
            why = (
                f"none of {len(ready)} prefill workers is fit and can hand over to "
                f"{decode.worker_id}"
            )
        return Assignment(
            "local", decode.worker_id, "", "no_prefill_worker", why, uncached, model=decode.model
        )

    prefill = _choose(prefillers, avoid, _PREFILL_COST[config.policy](num_tokens))
    if prefill is None:
        return Wait(f"all {len(prefillers)} prefill workers are full")
    reason, why, load = _explain(prefill, num_tokens, config.policy)
    source = _source(prefill, [one for one in workers if one.model.is_same(prefill.model)])
    cached = prefill.cached_tokens
    if source is not None:
        cached = source.cached_tokens
        why += f"; {source.worker_id} should hold {cached} of the prompt's {num_tokens}"
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
    )


def _with_prefill(
    decoders: Sequence[WorkerView], workers: Sequence[WorkerView]
) -> Sequence[WorkerView]:
    """Those decode workers whose version of the model has a prefill worker; all while there is one
    version.
    """
    if len({one.model for one in workers}) == 1:
        return decoders
    versions = {one.model for one in workers if one.pool == "prefill" and not one.sick}
    return [one for one in decoders if any(one.model.is_same(version) for version in versions)]


def _source(prefill: WorkerView, workers: Sequence[WorkerView]) -> PrefixSource | None:
    """The worker that holds most of the prompt, if that is at least a block more than the prefill
    worker does.

    Blocks are found by the hash of what is in them, so only those of the same size.
    """
    alike = [
        one
        for one in workers
        if one.block_size == prefill.block_size and one.worker_id != prefill.worker_id
    ]
    best = max(alike, key=lambda one: one.cached_tokens, default=prefill)
    if best.cached_tokens < prefill.cached_tokens + max(1, prefill.block_size):
        return None
    return PrefixSource(best.worker_id, best.address, best.cached_tokens)


Cost = Callable[[WorkerView], int]


def _choose(workers: Sequence[WorkerView], avoid: frozenset[str], cost: Cost) -> WorkerView | None:
    """The cheapest worker with room; of equals, the one that waited longest."""
    with_room = [one for one in workers if not one.full]
    candidates = [one for one in with_room if one.worker_id not in avoid] or with_room
    return min(candidates, key=lambda one: (cost(one), one.last_assigned), default=None)


# Costs in tokens: to compute before this request's first token, or, on a decode worker, to read in
# each step.
_PREFILL_COST: dict[PolicyName, Callable[[int], Cost]] = {
    "round_robin": lambda _num_tokens: lambda _worker: 0,
    "least_loaded": lambda _num_tokens: lambda worker: worker.queued_tokens,
    "kv_aware": lambda num_tokens: (
        lambda worker: worker.queued_tokens + num_tokens - worker.cached_tokens
    ),
}
_DECODE_COST: dict[PolicyName, Callable[[int], Cost]] = {
    "round_robin": lambda _num_tokens: lambda _worker: 0,
    "least_loaded": lambda _num_tokens: lambda worker: worker.held_tokens,
    "kv_aware": lambda num_tokens: (
        lambda worker: worker.held_tokens + num_tokens - worker.cached_tokens
    ),
}


def _explain(prefill: WorkerView, num_tokens: int, policy: PolicyName) -> tuple[Reason, str, str]:
    name = prefill.worker_id
    if policy == "round_robin":
        return "round_robin", f"it is {name}'s turn", ""
    if policy == "kv_aware" and prefill.cached_tokens:
        return (
            "prefix_hit",
            f"{name} should hold {prefill.cached_tokens} of {num_tokens} prompt tokens",
            "",
        )
    return "least_loaded", f"{name} has the least to do", f"{prefill.queued_tokens} tokens queued"
