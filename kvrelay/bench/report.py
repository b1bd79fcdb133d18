"""The results of the engines, compared with the limits of the machine."""

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
    """The least seconds that a case can take, by the roofline model."""

    compute_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        """The larger of the two bounds, in seconds."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def name(self) -> str:
        """The resource that bounds the case: `compute` or `memory`."""
        return "compute" if self.compute_seconds > self.memory_seconds else "memory"


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Results of `kvrelay bench engine`. The first engine is kvrelay's; a peer follows if there is
    one.
    """

    model: str
    machine: str
    # cpu or cuda.
    device: str
    cores: tuple[int, ...]
    limits: Limits
    cost: ModelCost
    # The dtype in which the weights are read.
    weights: str
    chunk_tokens: int
    # By engine name: facts and ready_seconds.
    engines: Mapping[str, Mapping[str, Any]]
    results: tuple[Measured, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the engines, kvrelay's first."""
        return tuple(self.engines)

    @property
    def prefill(self) -> tuple[Measured, ...]:
        """Results of the prefill cases."""
        return tuple(one for one in self.results if isinstance(one.case, PrefillCase))

    @property
    def decode(self) -> tuple[Measured, ...]:
        """Results of the decode cases."""
        return tuple(one for one in self.results if isinstance(one.case, DecodeCase))

    def bound(self, case: PrefillCase | DecodeCase) -> Bound:
        """Returns the roofline bound of a case on this machine."""
        work = case.work(self.cost, self.chunk_tokens, self.weights)
        return Bound(
            work.compute_seconds(self.limits, self.weights), work.memory_seconds(self.limits)
        )

    def ratio(self, result: Measured) -> float | None:
        """Returns the peer's time divided by kvrelay's; above 1, kvrelay is faster. None without a
        peer.
        """
        ours, *peers = self.names
        return result.median(peers[0]) / result.median(ours) if peers else None

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as plain data for JSON, with the derived figures."""
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
