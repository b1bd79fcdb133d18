"""What the engines did, beside what the machine allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvrelay.bench.cases import DecodeCase, PrefillCase
from kvrelay.bench.cost import ModelCost
from kvrelay.bench.engine_bench import Measured
from kvrelay.bench.limits import Limits
from kvrelay.bench.regression import decode_fit, prefill_growth


@dataclass(frozen=True, slots=True)
class Bound:
    """The least seconds that a case can take: a roofline."""

    compute_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def name(self) -> str:
        return "compute" if self.compute_seconds > self.memory_seconds else "memory"


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The first engine is ours; a peer follows where there is one."""

    model: str
    machine: str
    device: str  # cpu or cuda
    cores: tuple[int, ...]
    limits: Limits
    cost: ModelCost
    weights: str  # dtype in which they are read
    chunk_tokens: int
    engines: Mapping[str, Mapping[str, Any]]  # facts and ready_seconds, by name
    results: tuple[Measured, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.engines)

    @property
    def prefill(self) -> tuple[Measured, ...]:
        return tuple(one for one in self.results if isinstance(one.case, PrefillCase))

    @property
    def decode(self) -> tuple[Measured, ...]:
        return tuple(one for one in self.results if isinstance(one.case, DecodeCase))

    def bound(self, case: PrefillCase | DecodeCase) -> Bound:
        work = case.work(self.cost, self.chunk_tokens, self.weights)
        return Bound(
            work.compute_seconds(self.limits, self.weights), work.memory_seconds(self.limits)
        )

    def ratio(self, result: Measured) -> float | None:
        """The peer's time by ours: above 1, ours is ahead."""
        ours, *peers = self.names
        return result.median(peers[0]) / result.median(ours) if peers else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "machine": self.machine,
            "device": self.device,
            "cores": list(self.cores),
            "weights": self.weights,
            "chunk_tokens": self.chunk_tokens,
            "limits": asdict(self.limits),
            "cost": {**asdict(self.cost), "kv_token_bytes": self.cost.kv_token_bytes()},
            "engines": self.engines,
            "prefill": [self._row(result) for result in self.prefill],
            "decode": [self._row(result) for result in self.decode],
            "fits": {name: self._fits(name) for name in self.names},
        }

    def _row(self, result: Measured) -> dict[str, Any]:
        bound = self.bound(result.case)
        measured = {}
        for name, runs in result.seconds.items():
            seconds = result.median(name)
            measured[name] = {
                "seconds": seconds,
                "runs": list(runs),
                "tokens_per_second": result.case.tokens / seconds,
                "share": bound.seconds / seconds,
                "compute_share": bound.compute_seconds / seconds,
                "memory_share": bound.memory_seconds / seconds,
            }
        return {
            **asdict(result.case),
            "engines": measured,
            "ratio": self.ratio(result),
            "limit_seconds": bound.seconds,
            "bound": bound.name,
        }

    def _fits(self, engine: str) -> dict[str, Any]:
        fit = decode_fit(self.decode, engine, self.cost)
        return {
            "prefill_growth": prefill_growth(self.prefill, engine),
            "decode": asdict(fit) if fit is not None else None,
        }
