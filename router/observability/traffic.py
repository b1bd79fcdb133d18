"""What a router serves for a model now: its load, its totals and its latencies, of one process or
of all together. Pure.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvrelay.percentiles import percentile
from kvrelay.types.control_plane import RouterLoad

# Latencies that a process tells the others. They stand for all that it has measured.
MOST_LATENCIES = 256
# Fields of a load that add up.
_SUMS = (
    "running",
    "waiting",
    "waiting_tokens",
    "waiting_for_prefill",
    "waiting_prefill_tokens",
    "waiting_at_limit",
    "waiting_tokens_at_limit",
    "finished",
    "failed",
    "rss_bytes",
    "begun",
)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies in seconds, ascending, each of which stands for `weight` measured ones."""

    values: tuple[float, ...] = ()
    weight: float = 1.0

    def thinned(self) -> Latencies:
        """Returns at most MOST_LATENCIES of the values, evenly by rank, for all of them."""
        step = len(self.values) / MOST_LATENCIES
        if step <= 1:
            return self
        kept = (self.values[int((place + 0.5) * step)] for place in range(MOST_LATENCIES))
        return Latencies(tuple(kept), self.weight * step)


def percentiles(parts: Iterable[Latencies], *percents: float) -> tuple[float | None, ...]:
    """Returns the percentiles of the latencies of all parts; None without latencies."""
    weighted = sorted((value, part.weight) for part in parts for value in part.values)
    if len({weight for _, weight in weighted}) <= 1:
        values = [value for value, _ in weighted]
        return tuple(percentile(values, one) if values else None for one in percents)
    total = sum(weight for _, weight in weighted)
    return tuple(_weighted_percentile(weighted, one * total / 100) for one in percents)


def _weighted_percentile(weighted: Sequence[tuple[float, float]], rank: float) -> float:
    reached = 0.0
    for value, weight in weighted:
        reached += weight
        if reached >= rank:
            return value
    return weighted[-1][0]


@dataclass(frozen=True, slots=True)
class Traffic:
    """The traffic of one process. `totals` are counts since its start."""

    load: RouterLoad
    totals: Mapping[str, int]
    ttft: Latencies
    itl: Latencies

    def to_json(self) -> bytes:
        """For another process of this router."""
        load = {
            name: getattr(self.load, name) for name in ("router_id", "certificate_note", *_SUMS)
        }
        latencies = {name: asdict(getattr(self, name).thinned()) for name in ("ttft", "itl")}
        return json.dumps({"load": load, "totals": self.totals, **latencies}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Traffic:
        """Reads what `to_json` wrote, without the percentiles of the load. Raises an Exception for
        anything else.
        """
        parts = json.loads(text)
        load = parts["load"]
        counts: dict[str, Any] = {name: int(load[name]) for name in _SUMS}
        note = str(load["certificate_note"])
        return cls(
            RouterLoad(str(load["router_id"]), certificate_note=note, **counts),
            {str(name): int(total) for name, total in parts["totals"].items()},
            *(
                Latencies(tuple(map(float, one["values"])), float(one["weight"]))
                for one in (parts["ttft"], parts["itl"])
            ),
        )


@dataclass(frozen=True, slots=True)
class RouterTraffic:
    """The traffic of all processes of a router, this one first."""

    parts: tuple[Traffic, ...]

    @property
    def load(self) -> RouterLoad:
        """The load of all processes that have answered, under the name of this one."""
        own = self.parts[0].load
        if len(self.parts) == 1:
            return own
        loads = [one.load for one in self.parts]
        ttft, itl = self.ttft(95)[0], self.itl(95)[0]
        notes = dict.fromkeys(one.certificate_note for one in loads if one.certificate_note)
        return replace(
            own,
            **{name: sum(getattr(one, name) for one in loads) for name in _SUMS},
            processes=len(loads),
            ttft_p95_ms=None if ttft is None else ttft * 1000,
            itl_p95_ms=None if itl is None else itl * 1000,
            certificate_note="; ".join(notes),
        )

    @property
    def totals(self) -> dict[str, int]:
        """Counts since the starts of the processes."""
        counts: Counter[str] = Counter()
        for one in self.parts:
            counts.update(one.totals)
        return dict(counts)

    def ttft(self, *percents: float) -> tuple[float | None, ...]:
        """Returns percentiles of the time to first token in seconds."""
        return percentiles((one.ttft for one in self.parts), *percents)

    def itl(self, *percents: float) -> tuple[float | None, ...]:
        """Returns percentiles of the time between tokens in seconds."""
        return percentiles((one.itl for one in self.parts), *percents)
