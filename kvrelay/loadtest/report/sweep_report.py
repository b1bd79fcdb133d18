"""The report of one test: its rows, and the figures computed from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.statistics import Summary, summarize
from kvrelay.loadtest.report.timeline import Timeline
from kvrelay.loadtest.reuse import Reuse
from kvrelay.loadtest.slo import Slo
from kvrelay.percentiles import percentile

# The load generator counts as late when its p99 lateness is above both limits.
LATE_S = 0.01
# Share of the median TTFT.
LATE_SHARE = 0.05
# Share of the prompt tokens that a cache may report beyond whole blocks, because the blocks of the
# target may be smaller.
_SMALLER_BLOCKS_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Report:
    """The rows of one test, and the figures computed from them."""

    # The options of the test.
    options: dict[str, Any]
    slos: tuple[Slo, ...]
    # In order of arrival.
    rows: tuple[Row, ...]
    # Set if the target reports the state of its cluster.
    timeline: Timeline | None = None
    # Set if the prompts are token ids.
    reuse: Reuse | None = None
    interrupted: bool = False
    # Requests that were sent and had no answer yet when the test ended, without a row.
    in_flight: int = 0
    # Planned requests that were not sent. None: the plan has no end.
    unsent: int | None = None
    # One of this many requests has a row. Above 1 for large simulations.
    row_every: int = 1

    @property
    def answered(self) -> tuple[Row, ...]:
        """The rows of the answered requests."""
        return tuple(row for row in self.rows if row.ok)

    @property
    def duration_s(self) -> float:
        """Seconds from the start of the test to the end of the last answer or failure."""
        return max(
            (row.scheduled_s + row.e2e_s for row in self.rows if row.e2e_s is not None), default=0.0
        )

    @property
    def errors(self) -> dict[str, int]:
        """Number of failed requests by status code. The most frequent code comes first."""
        return _counted(row.error for row in self.rows if row.error)

    @property
    def paths(self) -> dict[str, int]:
        """Number of answered requests by path. The most frequent path comes first."""
        return _counted(row.path for row in self.answered)

    @property
    def good_share(self) -> float:
        """Share of all requests that met every objective. A failed request meets none."""
        return sum(map(self.good, self.answered)) / len(self.rows) if self.rows else 0.0

    def good(self, row: Row) -> bool:
        """Whether an answered request met every objective."""
        return all(slo.met(row) for slo in self.slos)

    def rates(self) -> dict[str, float]:
        """Returns totals per second of `duration_s`, by which `vllm bench serve` divides, too."""
        answered, seconds = self.answered, self.duration_s
        totals = {
            "requests": len(answered),
            "output tokens": sum(row.output_tokens for row in answered),
            "prompt tokens": sum(row.prompt_tokens for row in answered),
        }
        if self.slos:
            totals["goodput requests"] = sum(map(self.good, answered))
        return {
            name: self.row_every * total / seconds if seconds else 0.0
            for name, total in totals.items()
        }

    def samples(self) -> dict[str, list[float]]:
        """Returns the samples of the answered requests, in seconds."""
        rows = self.answered
        found: dict[str, list[float | None]] = {
            "TTFT": [row.ttft_s for row in rows],
            "second token gap": [row.second_token_gap_s for row in rows],
            "ITL": [gap for row in rows for gap in row.itl_s],
            "TPOT": [row.tpot_s for row in rows],
            "E2E": [row.e2e_s for row in rows],
            "late start": [row.late_s for row in rows],
        }
        return {name: [one for one in sample if one is not None] for name, sample in found.items()}

    def latencies(self) -> dict[str, Summary | None]:
        """Returns the statistics of the answered requests, in seconds; None for an empty sample."""
        return {name: summarize(sample) for name, sample in self.samples().items()}

    @property
    def late_p99_s(self) -> float:
        """p99 of the lateness of the load generator itself, in seconds."""
        return percentile(sorted(row.late_s for row in self.rows), 99) if self.rows else 0.0

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons why the figures may be misleading."""
        found = []
        ttft = self.latencies()["TTFT"]
        if self.late_p99_s > max(LATE_S, LATE_SHARE * (ttft.median if ttft else 0.0)):
            found.append(
                f"the load generator was late: p99 {self.late_p99_s * 1000:.0f} ms after the "
                "scheduled arrival. Every latency in this report includes the delay. Give the load "
                "generator a core of its own, or lower the rate."
            )
        if self.row_every > 1:
            found.append(
                f"one of {self.row_every} requests has a row; rates are for all requests, counts "
                "are of the rows."
            )
        if self.interrupted:
            answered = len(self.answered)
            found.append(
                f"interrupted: {len(self.rows) + self.in_flight} requests were sent, of which "
                f"{answered} were answered, {len(self.rows) - answered} failed and "
                f"{self.in_flight} were in flight"
                + ("" if self.unsent is None else f"; {self.unsent} were not sent")
                + ". The report has those that were answered or failed."
            )
        cut = self.options.get("cut")
        if cut and cut["requests"]:
            found.append(
                f"{cut['requests']} requests were cut to the model's context: "
                f"{cut['tokens'] / cut['of_tokens']:.1%} of all requested tokens were dropped."
            )
        if self.reuse is not None and self.reuse.prompt:
            shares = self.reuse.shares()
            if shares["reported"] > shares["unlimited"] + _SMALLER_BLOCKS_SHARE:
                found.append(
                    f"{shares['reported']:.1%} of the prompt tokens came from a cache, but this "
                    f"test explains only {shares['unlimited']:.1%}: prompts were cached before "
                    "the test; use another --seed."
                )
        if self.timeline is not None and self.timeline.missed:
            found.append(f"the cluster's status timed out {self.timeline.missed} times.")
        return tuple(found)

    @property
    def strayed(self) -> tuple[Row, ...]:
        """Answered requests that should have been disaggregated and were not."""
        return tuple(row for row in self.answered if row.should_have_been_disaggregated)


def _counted(names: Iterable[str]) -> dict[str, int]:
    """Counts names, the most frequent first. Equal counts are in order of the names, so that the
    order does not tell which request came first.
    """
    return dict(sorted(Counter(names).items(), key=lambda one: (-one[1], one[0])))
