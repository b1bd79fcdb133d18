"""Sizes of the pools for the requests that are expected by the time that a new worker serves. Pure:
the time is an argument, in monotonic seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoscaler.arrivals import Arrivals
from autoscaler.load_correction import LoadCorrection
from autoscaler.scaling_policy import Foreseen, least_size
from kvrelay.config.autoscaling_policy import AutoscalingPolicy, PoolPolicy
from kvrelay.config.config_file import load_profile
from kvrelay.config.schema import ClusterConfig
from kvrelay.planning.profile import Profile
from kvrelay.planning.quantity import plain
from kvrelay.planning.sizing.demand import Demand, LatencySlo
from kvrelay.planning.sizing.disaggregated import PoolSize, decode_pool, prefill_pool
from kvrelay.planning.sizing.worker_kind import FlatKv, FormulaCosts, WorkerKind
from kvrelay.planning.workload import Workload
from kvrelay.types.control_plane import RECENT, RequestShape, RouterLoad
from kvrelay.types.workers import POOLS, PoolName, WorkerInfo

# The rate of arrivals is measured over this many times the time that it is extrapolated by, within
# these bounds in seconds.
_WINDOW = 3
_SHORTEST_S, _LONGEST_S = 30.0, 300.0
# Workers report their load of the last 10 s.
_LOAD_S = 10.0
# Finished requests without which the lengths are unknown.
_FEW = 8
# An SLO that no request misses, for the pool that the SLO is not about.
_ANY_S = 1e6


class LookAhead:
    """Owns the arrivals and the corrections of one controller.

    - The load is the expected rate of requests times the work of the last ones: the profile's step
      costs over their lengths.
    - The work is corrected by the ratio of the load that the workers measure to the load that the
      profile gives for the requests that have caused it.
    - The size is that of `kvrelay plan` for this load, the smallest pool in which 90% of the
      requests keep the latency, and at least `least_size`.
    """

    def __init__(
        self, policy: AutoscalingPolicy, profile: Profile, chunk_tokens: int, max_batch: int
    ) -> None:
        """`chunk_tokens` of the prefill pool, `max_batch` of a decode worker."""
        self._policy = policy
        self._profile = profile
        self._chunk_tokens = chunk_tokens
        self._max_batch = max_batch
        # From the moment at which a load asks for a worker until the worker serves.
        self._ahead_s = {pool: self._horizon_s(policy.pool(pool)) for pool in POOLS}
        longest = _WINDOW * max(self._ahead_s.values())
        window_s = min(_LONGEST_S, max(_SHORTEST_S, longest))
        self._arrivals = Arrivals(window_s, gap_s=_LOAD_S + 2 * policy.interval_s)
        self._corrections = {pool: LoadCorrection() for pool in POOLS}

    def _horizon_s(self, rules: PoolPolicy | None) -> float:
        delay = 0.0 if rules is None else rules.upscale_delay_s
        return self._policy.interval_s + delay + self._profile.costs.start_s

    def foresee(
        self, workers: Sequence[WorkerInfo], routers: Sequence[RouterLoad], now: float
    ) -> Mapping[PoolName, Foreseen]:
        """Returns the size of each pool that has the metric slo. Empty while the rate or the
        lengths of the requests are unknown.
        """
        self._arrivals.seen(routers, now)
        shapes = [shape for one in routers for shape in one.recent[:RECENT]]
        now_rate = self._arrivals.recent_rate(_LOAD_S)
        if len(shapes) < _FEW or now_rate is None:
            return {}
        found: dict[PoolName, Foreseen] = {}
        for pool in POOLS:
            rules = self._policy.pool(pool)
            if rules is None:
                continue
            slo = next((one for one in rules.metrics if one.name == "slo"), None)
            if slo is None:
                continue
            limit_s = ((slo.ttft_ms if pool == "prefill" else slo.itl_ms) or 0.0) / 1000
            kind = self._kind(workers)
            demand = self._demand(limit_s, pool, now_rate, shapes)
            self._correct(pool, demand, kind, workers, now)
            expected = self._arrivals.rate(self._ahead_s[pool])
            if expected is not None:
                demand = with_rate(demand, expected)
                found[pool] = self._foreseen(pool, demand, kind, now_rate, rules.tolerance)
        return found

    def _kind(self, workers: Sequence[WorkerInfo]) -> WorkerKind:
        rooms = [one.load.blocks_total * one.block_bytes for one in workers if one.pool == "decode"]
        # Workers may keep the KV in another dtype than the profile's.
        sizes = [one.block_bytes / one.block_size for one in workers if one.pool == "decode"]
        kv = FlatKv(max(sizes, default=self._profile.kv_token_bytes))
        return WorkerKind(1, FormulaCosts(self._profile.costs), kv, min(rooms, default=math.inf))

    def _demand(
        self, limit_s: float, pool: PoolName, rate: float, shapes: Sequence[RequestShape]
    ) -> Demand:
        prompts = sum(one.prompt_tokens for one in shapes)
        cached = sum(min(one.cached_tokens, one.prompt_tokens) for one in shapes)
        lengths = tuple(
            sorted((max(1, one.prompt_tokens), max(1, one.output_tokens)) for one in shapes)
        )
        share = cached / prompts if prompts else 0.0
        ttft_s, itl_s = (limit_s, _ANY_S) if pool == "prefill" else (_ANY_S, limit_s)
        workload = Workload(rate, rate, 1.0, lengths, cached_share=share)
        return Demand(workload, LatencySlo(ttft_s, itl_s), self._chunk_tokens)

    def _load(self, pool: PoolName, demand: Demand, kind: WorkerKind) -> float:
        """Returns the workers that the demand keeps busy."""
        work = demand.workload
        if pool == "prefill":
            return work.rate * demand.mean(demand.services(kind))
        mean, spread = work.context()
        most = max(1, min(kind.memory_batch(mean, spread), self._max_batch))
        # Beyond some batch, each sequence more may cost more than the mean.
        best = kind.throughput(kind.fastest_batch(mean, most), mean)
        return work.rate * work.decoded / best

    def _correct(
        self,
        pool: PoolName,
        demand: Demand,
        kind: WorkerKind,
        workers: Sequence[WorkerInfo],
        now: float,
    ) -> None:
        """Compares the workers' measured load with the load of the requests that have caused it:
        those that arrived while the workers measured, and up to an answer's time before.
        """
        loads = [one.load for one in workers if one.pool == pool and one.state == "ready"]
        rate = self._arrivals.recent_rate(_LOAD_S + self._service_s(pool, demand, kind))
        if rate is not None and loads:
            expected = self._load(pool, with_rate(demand, rate), kind)
            busy = sum(one.busy_share for one in loads)
            self._corrections[pool].add(busy, expected, len(loads), now)

    def _service_s(self, pool: PoolName, demand: Demand, kind: WorkerKind) -> float:
        """Returns the mean time that a request has a worker of the pool, in seconds."""
        if pool == "prefill":
            return demand.mean(demand.services(kind))
        work = demand.workload
        mean, _ = work.context()
        return work.decoded * kind.costs.decode_s(1, mean)

    def _foreseen(
        self, pool: PoolName, demand: Demand, kind: WorkerKind, present: float, tolerance: float
    ) -> Foreseen:
        ratio, work = self._corrections[pool].ratio, demand.workload
        if pool == "prefill":
            latency = f"TTFT {plain(demand.slo.ttft_s * 1000)} ms"
            each = f"{plain(work.mean_prompt, 4)} prompt tokens, {work.cached_share:.0%} cached"
        else:
            latency = f"ITL {plain(demand.slo.itl_s * 1000)} ms"
            each = f"{plain(work.mean_answer, 4)} tokens"
        text = (
            f"slo: {plain(work.rate, 3)} requests/s in {plain(self._ahead_s[pool], 3)} s "
            f"({plain(present, 3)} now) of {each}, measured load {plain(ratio, 2)} x expected"
        )
        if pool == "prefill" and not work.rate:
            # The policy's min_replicas may be 0.
            return Foreseen(0, f"{text} → 0")
        size, why_not = self._size(pool, with_rate(demand, work.rate * ratio), kind)
        most, _ = self._size(pool, with_rate(demand, work.rate * ratio * (1 + tolerance)), kind)
        if why_not:
            return Foreseen(size, f"{text}; {why_not} → {size} for the load alone", most)
        return Foreseen(size, f"{text}, {latency} → {size}", most)

    def _size(self, pool: PoolName, demand: Demand, kind: WorkerKind) -> tuple[int, str]:
        """Returns the size for a demand, and why no size keeps the latency, if none does. More
        workers than the load needs would not change that.
        """
        # The same room for chance that keeps a pool from shrinking.
        least = max(1, least_size(self._load(pool, demand, kind)))
        found = (
            prefill_pool(demand, kind)
            if pool == "prefill"
            else decode_pool(demand, kind, self._max_batch)
        )
        if isinstance(found, PoolSize):
            return max(found.workers, least), ""
        return least, found


def with_rate(demand: Demand, rate: float) -> Demand:
    """Returns the demand with another number of requests per second."""
    return replace(demand, workload=replace(demand.workload, rate=rate, mean_rate=rate))


def look_ahead(policy: AutoscalingPolicy | None, config: ClusterConfig) -> LookAhead | None:
    """Returns what answers the metric slo; None if the policy does not have it. Reads the policy's
    profile. Raises ConfigError.
    """
    if policy is None or (profile := load_profile(policy)) is None:
        return None
    return LookAhead(policy, profile, config.prefill.chunk_tokens, config.decode.max_batch)
