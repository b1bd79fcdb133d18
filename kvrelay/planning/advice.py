"""The smallest disaggregated and colocated clusters for a demand, and which one to take. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.errors import FailedPrecondition
from kvrelay.planning.sizing.colocated import ColocatedSize, colocated
from kvrelay.planning.sizing.demand import Demand
from kvrelay.planning.sizing.disaggregated import PoolSize, decode_pool, prefill_pool
from kvrelay.planning.sizing.worker_kind import WorkerKind


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a cluster, in the currency of the price."""

    per_hour: float
    # Per million generated tokens, and per million tokens of prompts and answers.
    per_million_output: float
    per_million_tokens: float


@dataclass(frozen=True, slots=True)
class Advice:
    """Which cluster serves a demand. At least one of both forms is possible."""

    prefill: PoolSize | None
    decode: PoolSize | None
    colocated: ColocatedSize | None
    # Why a form is impossible; empty if it is possible.
    no_disaggregation: str
    no_colocation: str

    @property
    def devices(self) -> int | None:
        """Devices of the disaggregated cluster."""
        if self.prefill is None or self.decode is None:
            return None
        return self.prefill.devices + self.decode.devices

    @property
    def disaggregate(self) -> bool:
        """Whether the disaggregated cluster takes fewer devices. The colocated one is simpler."""
        if self.devices is None:
            return False
        return self.colocated is None or self.devices < self.colocated.devices

    @property
    def chosen_devices(self) -> int:
        """Devices of the cluster to take."""
        if self.disaggregate or self.colocated is None:
            assert self.devices is not None
            return self.devices
        return self.colocated.devices

    @property
    def verdict(self) -> str:
        """The decision in one sentence, with figures."""
        if self.colocated is None:
            return (
                f"Disaggregate: {_devices(self.devices)} meet the SLO, and no colocated cluster "
                f"does: {self.no_colocation}."
            )
        other = f"a colocated cluster takes {_devices(self.colocated.devices)}"
        if self.devices is None:
            return f"Do not disaggregate: {other}, and no disaggregated one meets the SLO: " + (
                f"{self.no_disaggregation}."
            )
        if self.disaggregate:
            less = 1 - self.devices / self.colocated.devices
            return (
                f"Disaggregate: {_devices(self.devices)} meet the SLO, and {other}: {less:.0%} "
                "fewer."
            )
        if self.devices == self.colocated.devices:
            return (
                f"Do not disaggregate: {other} for the same SLO, as many as prefill and decode "
                "pools together, without hand-offs."
            )
        return (
            f"Do not disaggregate: {other} for the same SLO, and prefill and decode pools take "
            f"{self.devices}."
        )

    @property
    def bottleneck(self) -> str:
        """What most devices are needed for, and why they cannot be fewer."""
        if self.disaggregate or self.colocated is None:
            assert self.prefill is not None
            assert self.decode is not None
            pool, name = max(
                ((self.prefill, "prefill"), (self.decode, "decode")), key=lambda one: one[0].devices
            )
            return f"{name}: {pool.limit} ({pool.utilisation:.0%} busy)"
        if self.colocated.workers == 1:
            return "none: one worker suffices"
        half = self.colocated.prompt_share > self.colocated.batch / self.colocated.max_batch
        if half:
            return f"prompts: {self.colocated.prompt_share:.0%} of the time computes them"
        share = self.colocated.batch / self.colocated.max_batch
        return f"decode: {share:.0%} of the batch slots are taken"

    def cost(self, demand: Demand, price: float) -> Cost:
        """Returns the cost of the cluster to take. price: per device and hour. The devices are
        those of the busiest time, and the tokens those of the mean rate.
        """
        work = demand.workload
        hour = price * self.chosen_devices
        answers = work.mean_rate * 3600 * work.mean_answer / 1e6
        tokens = answers + work.mean_rate * 3600 * work.mean_prompt / 1e6
        return Cost(hour, hour / answers, hour / tokens)


def advise(demand: Demand, kinds: Sequence[WorkerKind]) -> Advice:
    """Returns the smallest clusters over all kinds of workers, which differ in their degrees.

    Raises FailedPrecondition, with the reasons, if no cluster meets the SLO.
    """
    longest = demand.workload.longest
    able = [one for one in kinds if one.kv.sequence_bytes(longest) <= one.kv_room]
    if not able:
        raise FailedPrecondition(
            f"the longest request has {longest:,} tokens, and no worker has memory for its KV; use "
            "more or larger devices, or cut the workload"
        )
    pools = [[size(demand, kind) for kind in able] for size in (prefill_pool, decode_pool)]
    prefill, no_prefill = _best(pools[0])
    decode, no_decode = _best(pools[1])
    merged = [colocated(demand, kind) for kind in able]
    both = [one for one in merged if isinstance(one, ColocatedSize)]
    together = min(both, key=lambda one: (one.devices, one.degree), default=None)
    no_merged = "" if together else next(one for one in reversed(merged) if isinstance(one, str))
    if together is None and (prefill is None or decode is None):
        raise FailedPrecondition(
            f"no cluster meets the SLO: {no_prefill or no_decode}; relax the SLO, or use faster "
            "devices or a smaller model"
        )
    if prefill is None or decode is None:
        prefill = decode = None
    return Advice(prefill, decode, together, no_prefill or no_decode, no_merged)


def _devices(number: int | None) -> str:
    return "1 device" if number == 1 else f"{number} devices"


def _best(sizes: Sequence[PoolSize | str]) -> tuple[PoolSize | None, str]:
    """Returns the pool with the fewest devices, or the reason of the highest degree."""
    able = [one for one in sizes if isinstance(one, PoolSize)]
    if able:
        return min(able, key=lambda one: (one.devices, one.degree)), ""
    return None, next(one for one in reversed(sizes) if isinstance(one, str))
