"""A test's result: its rows, and all that follows from them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.row import Row
from kvrelay.loadtest.slo import Slo
from kvrelay.loadtest.statistics import Summary, summarize

FORMAT = "kvrelay-loadtest-1"


@dataclass(frozen=True, slots=True)
class Report:
    options: dict[str, Any]  # what the test was asked to do
    slos: tuple[Slo, ...]
    rows: tuple[Row, ...]  # in order of arrival

    @property
    def answered(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.ok)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last answer's end."""
        return max((row.scheduled_s + row.e2e_s for row in self.answered if row.e2e_s is not None), default=0.0)

    @property
    def errors(self) -> dict[str, int]:
        """Requests by status code."""
        return dict(Counter(row.error for row in self.rows if row.error).most_common())

    @property
    def paths(self) -> dict[str, int]:
        return dict(Counter(row.path for row in self.answered).most_common())

    @property
    def good_share(self) -> float:
        """Of all requests, those that met every objective. A failed one meets none."""
        return sum(all(slo.met(row) for slo in self.slos) for row in self.answered) / len(self.rows)

    def rates(self) -> dict[str, float]:
        """Per second of the test's duration."""
        answered, seconds = self.answered, self.duration_s
        totals = {
            "requests": len(answered),
            "output tokens": sum(row.output_tokens for row in answered),
            "prompt tokens": sum(row.prompt_tokens for row in answered),
        }
        if self.slos:
            totals["goodput requests"] = sum(all(slo.met(row) for slo in self.slos) for row in answered)
        return {name: total / seconds if seconds else 0.0 for name, total in totals.items()}

    def latencies(self) -> dict[str, Summary | None]:
        """In seconds, of the answered requests."""
        rows = self.answered
        samples: dict[str, list[float | None]] = {
            "TTFT": [row.ttft_s for row in rows],
            "second token gap": [row.second_token_gap_s for row in rows],
            "ITL": [gap for row in rows for gap in row.itl_s],
            "TPOT": [row.tpot_s for row in rows],
            "E2E": [row.e2e_s for row in rows],
            "late start": [row.late_s for row in rows],
        }
        return {name: summarize([one for one in sample if one is not None]) for name, sample in samples.items()}

    def save(self, file: Path) -> None:
        """Raises InvalidArgument if the file cannot be written."""
        latencies = self.latencies().items()
        document = {
            "format": FORMAT,
            "options": self.options,
            "slos": [asdict(slo) for slo in self.slos],
            "duration_seconds": self.duration_s,
            "rates_per_second": self.rates(),
            "latencies_seconds": {name: summary and asdict(summary) for name, summary in latencies},
            "errors": self.errors,
            "paths": self.paths,
            "requests": [asdict(row) for row in self.rows],
        }
        try:
            file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidArgument(f"{file}: {error.strerror}") from error


def load_report(file: Path) -> Report:
    """Reads what `save` wrote; the numbers are computed again from the rows. Raises InvalidArgument."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']!r} is not {FORMAT}")
        rows: Sequence[dict[str, Any]] = document["requests"]
        return Report(
            options=document["options"],
            slos=tuple(Slo(**slo) for slo in document["slos"]),
            rows=tuple(Row(**row | {"itl_s": tuple(row["itl_s"])}) for row in rows),
        )
    except OSError as error:
        raise InvalidArgument(f"{file}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{file}: not a file that `kvrelay loadtest run --json` wrote: {error}") from error
