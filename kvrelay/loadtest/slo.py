"""Service level objectives, for goodput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.row import Row

METRICS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    metric: str  # one of METRICS
    milliseconds: float

    def met(self, row: Row) -> bool:
        """A request with one token has no TPOT, so it cannot miss one; one that failed meets nothing."""
        seconds: float | None = getattr(row, f"{self.metric}_s")
        if seconds is None:
            return row.ok and self.metric == "tpot"
        return row.ok and seconds * 1000 <= self.milliseconds


def parse_slos(texts: Sequence[str]) -> tuple[Slo, ...]:
    """`ttft:200`, `tpot:50`, `e2e:2000`, in milliseconds. Raises InvalidArgument."""
    slos = {}
    for text in texts:
        metric, _, number = text.partition(":")
        try:
            milliseconds = float(number)
        except ValueError:
            milliseconds = math.nan
        if metric not in METRICS or not 0 < milliseconds < math.inf:
            raise InvalidArgument(f"goodput: {text!r} is not one of ttft:MS, tpot:MS, e2e:MS", field="goodput")
        if metric in slos:
            raise InvalidArgument(f"goodput: {metric} is given twice", field="goodput")
        slos[metric] = Slo(metric, milliseconds)
    return tuple(slos.values())
