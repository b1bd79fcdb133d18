"""The comparison of the scaling policies in short: the one that looks ahead serves a rising load
better than the one that waits for queues, for no more workers.
"""

from __future__ import annotations

import look_ahead
import pytest

from kvrelay.loadtest.report.sweep_report import Report


def met(report: Report) -> float:
    return sum(all(slo.met(row) for slo in report.slos) for row in report.rows) / len(report.rows)


@pytest.mark.long
def test_a_rising_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def rising(second: float) -> float | None:
        return None if second > 240 else min(1.0, 0.1 + max(0.0, second - 60) / 150)

    monkeypatch.setitem(look_ahead.LOADS, "rising", rising)
    worker = look_ahead.profile(start_s=30)
    lengths = look_ahead.drawn(500, seed=0)
    waits, looks = (
        look_ahead.run(name, "rising", worker, 20, lengths, seed=0)
        for name in ("queue-depth", "look-ahead")
    )
    assert met(looks) > met(waits) + 0.05
