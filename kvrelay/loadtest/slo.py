"""Service level objectives, for goodput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.report.row import Row

METRICS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """One objective. Raises InvalidArgument for an unknown metric or a bound that is not positive
    and finite.
    """

    # One of METRICS.
    metric: str
    milliseconds: float

    def __post_init__(self) -> None:
        if self.metric not in METRICS or not 0 < self.milliseconds < math.inf:
            text = f"{self.metric}:{self.milliseconds:g}"
            raise InvalidArgument(
                f"goodput: {text!r:.40} is not one of ttft:MS, tpot:MS, e2e:MS", field="goodput"
            )

    def met(self, row: Row) -> bool:
        """Whether a request met the objective. A request with one token has no TPOT and so meets
        every TPOT objective. A failed request meets none.
        """
        seconds: float | None = getattr(row, f"{self.metric}_s")
        if seconds is None:
            return row.ok and self.metric == "tpot"
        return row.ok and seconds * 1000 <= self.milliseconds


def parse_slos(texts: Sequence[str]) -> tuple[Slo, ...]:
    """Parses `ttft:200`, `tpot:50`, `e2e:2000`, in milliseconds. Raises InvalidArgument."""
    slos = {}
    for text in texts:
        metric, _, number = text.partition(":")
        if metric in slos:
            raise InvalidArgument(
                f"goodput: {metric} is given twice; give each objective once", field="goodput"
            )
        try:
            slos[metric] = Slo(metric, float(number))
        except ValueError:
            raise InvalidArgument(
                f"goodput: {text!r} is not one of ttft:MS, tpot:MS, e2e:MS", field="goodput"
            ) from None
    return tuple(slos.values())
