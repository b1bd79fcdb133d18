"""Recent history of the cluster: one sample every SAMPLE_S seconds. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

SAMPLE_S = 2.0
SAMPLES = 150  # five minutes


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of the cluster at one time. None means that there was nothing to measure."""

    generated_per_s: float  # tokens
    prompt_per_s: float  # tokens
    running: int
    waiting: int
    # Sequences that wait on prefill workers.
    prefill_queue: int
    # Held fraction of the decode workers' blocks.
    decode_kv: float | None
    prefill_workers: int
    decode_workers: int
    ttft_p50: float | None  # seconds
    ttft_p95: float | None  # seconds
    itl_p50: float | None  # seconds
    itl_p95: float | None  # seconds


class History:
    """Owns the last SAMPLES samples and the counters of the rates."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        # The counters of each process.
        self._counted: Mapping[str, Mapping[str, int]] = {}
        self._at = 0.0

    def rate(self, totals: Mapping[str, Mapping[str, int]], now: float) -> dict[str, float]:
        """Returns each counter's growth per second since the last call, over all processes that
        counted then and now; 0 for the first call.

        totals: the counters of each process, by any name of the process.
        """
        before, elapsed = self._counted, now - self._at
        self._counted, self._at = totals, now
        growth: Counter[str] = Counter()
        for process, counts in totals.items():
            growth.update(counts)
            growth.subtract(before.get(process, counts))
        return {name: grown / elapsed if elapsed > 0 else 0.0 for name, grown in growth.items()}

    def add(self, sample: Sample) -> None:
        """Adds a sample and drops the oldest above SAMPLES."""
        self._samples.append(sample)

    def columns(self) -> dict[str, list[float | None]]:
        """Returns the values of each field, oldest first, rounded to four decimals."""
        return {
            name: [_short(getattr(sample, name)) for sample in self._samples]
            for name in Sample.__dataclass_fields__
        }


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
