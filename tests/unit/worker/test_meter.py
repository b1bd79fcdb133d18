from __future__ import annotations

from kvrelay.clock import ManualClock
from kvrelay.worker.steps.meter import Meter


def test_the_95th_percentile_of_20_waits_is_not_the_longest() -> None:
    clock = ManualClock()
    meter = Meter(clock)
    assert meter.queue_wait_p95_ms() == 0.0
    for wait_s in [*range(1, 20), 1000]:
        meter.waited(wait_s)
    assert meter.queue_wait_p95_ms() == 19_000.0
    clock.advance(31.0)
    assert meter.queue_wait_p95_ms() == 0.0
