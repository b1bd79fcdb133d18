"""How the cluster fared in the last minutes: one sample every SAMPLE_S seconds. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

SAMPLE_S = 2.0
SAMPLES = 150  # five minutes


@dataclass(frozen=True, slots=True)
class Sample:
    """None: there was nothing to measure."""

    generated_per_s: float  # tokens
    prompt_per_s: float  # tokens
    running: int
    waiting: int
    prefill_queue: int  # sequences that wait on prefill workers
    decode_kv: float | None  # held part of the decode workers' blocks
    prefill_workers: int
    decode_workers: int
    ttft_p50: float | None  # seconds, as the others
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None


class History:
    """The last SAMPLES samples, and the counters that rates are made of."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._counted: Mapping[str, int] = {}
        self._at = 0.0

    def rate(self, totals: Mapping[str, int], now: float) -> Mapping[str, float]:
        """Growth per second of each counter since the last call; 0 at the first."""
        before, elapsed = self._counted or totals, now - self._at
        self._counted, self._at = totals, now
        return {
            name: (total - before[name]) / elapsed if elapsed > 0 else 0.0
            for name, total in totals.items()
        }

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def columns(self) -> dict[str, list[float | None]]:
        """Oldest first, with as many digits as a picture has."""
        return {
            name: [_short(getattr(sample, name)) for sample in self._samples]
            for name in Sample.__dataclass_fields__
        }


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
