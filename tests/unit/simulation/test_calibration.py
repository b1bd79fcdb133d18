"""What a recorded load test tells of a cluster: a simulation with known delays and step times is
recorded, and the calibration finds them again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import simulated

from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.planning.profile import Profile
from kvrelay.simulation.calibration import calibrate
from kvrelay.simulation.scenario import Delays, Scenario, StepTimes
from kvrelay.types.requests import Attempt, Handoff, Ledger

DELAYS = Delays(request_s=0.004, message_s=0.0015, handoff_s=0.003)
# Quantiles of a distribution with the mean 1.
NOISE = (0.8, 0.9, 0.95, 1.0, 1.35)
TIMES = {
    "prefill": StepTimes(1.1, {"prefill": 1.1, "decode": 1.3}, NOISE),
    "decode": StepTimes(1.2, {"prefill": 1.15, "decode": 1.4}, NOISE),
}
CHUNK = 512


def recorded(prefill: int, decode: int, **load: Any) -> Report:
    scenario = replace(
        simulated.scenario(prefill, decode, config={"slo": None}, delays=DELAYS),
        cores=prefill + decode,
        times=TIMES,
    )
    # Steps of one token at a time, as a client sees them.
    return simulated.run(scenario, simulated.poisson(**load))


def test_a_simulated_cluster_is_found_again() -> None:
    tests = {
        "pools": recorded(1, 1, rate=6.0, count=400, prompt=(64, 1200), answer=(4, 60)),
        "colocated": recorded(0, 2, rate=8.0, count=400, prompt=(64, 300), answer=(20, 60)),
    }
    found = calibrate(tests, simulated.profile().costs, CHUNK)
    assert found.delays.message_s == pytest.approx(DELAYS.message_s, rel=0.15)
    assert found.delays.request_s == pytest.approx(DELAYS.request_s, rel=0.15)
    assert found.delays.handoff_s == pytest.approx(DELAYS.handoff_s, rel=0.3)
    for pool, wanted in TIMES.items():
        times = found.times[pool]  # type: ignore[index]
        assert times.alone == pytest.approx(wanted.alone, rel=0.05), pool
        assert sum(times.noise) == pytest.approx(len(times.noise))
        assert times.noise[len(times.noise) // 20] == pytest.approx(NOISE[0], rel=0.1)
        for kind in ("prefill", "decode"):
            if (pool, kind) != ("prefill", "prefill"):
                # No prefill worker is beside another one here.
                assert times.beside[kind] == pytest.approx(wanted.beside[kind], rel=0.08), (
                    pool,
                    kind,
                )


def test_what_no_test_shows_is_the_worst_that_one_does() -> None:
    tests = {"pools": recorded(1, 1, rate=6.0, count=200, prompt=(100, 800), answer=(4, 60))}
    found = calibrate(tests, simulated.profile().costs, CHUNK)
    decode = found.times["decode"].beside
    assert decode["decode"] == decode["prefill"] > 1.05


def test_a_simulation_as_profiled_is_found_as_profiled() -> None:
    cluster = simulated.scenario(1, 1, config={"slo": None}, delays=Delays(0.0, 0.0, 0.0))
    report = simulated.run(cluster, simulated.poisson(5.0, 200))
    found = calibrate({"one": report}, simulated.profile().costs, CHUNK)
    for times in found.times.values():
        assert times.alone == pytest.approx(1.0, rel=0.03)
        assert all(one == pytest.approx(1.0, rel=0.05) for one in times.beside.values())
    assert found.delays.request_s == pytest.approx(0.0, abs=1e-9)
    assert found.delays.message_s <= Delays().message_s


def edited(report: Report, every: int, **values: Any) -> Report:
    """Returns the report with these values in each n-th row."""
    rows = tuple(replace(one, **values) if one.index % every == 0 else one for one in report.rows)
    return replace(report, rows=rows)


def test_a_test_that_tells_too_little_is_refused() -> None:
    costs, report = simulated.profile().costs, recorded(1, 1, rate=5.0, count=60)
    few = recorded(1, 1, rate=5.0, count=9)
    ledger = report.rows[0].ledger
    assert ledger is not None
    twice = replace(ledger, attempts=ledger.attempts * 2)
    for wrong, reason in (
        (few, "real.json: 9 answers have a ledger"),
        (edited(report, 1, ledger=None), "0 answers have a ledger"),
        (edited(report, 10, error="INTERNAL"), "6 of 60 requests failed"),
        (edited(report, 10, ledger=twice), "6 of 60 requests failed"),
        (replace(report, interrupted=True, in_flight=10), "10 of 70 requests failed"),
        (replace(report, row_every=2), "has one of 2 requests"),
        (edited(report, 1, itl_s=(1e-5,) * 9, output_tokens=10), "decode steps took .* times the"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            calibrate({"real.json": wrong}, costs, CHUNK)
    # A profile of a much faster or slower machine.
    for factor in (0.01, 30.0):
        costs = simulated.profile(
            **{
                name: factor * value
                for name, value in simulated.COSTS.items()
                if name.startswith(("prefill", "decode"))
            }
        ).costs
        with pytest.raises(InvalidArgument, match=r"prefill steps took .* times the profile"):
            calibrate({"real.json": report}, costs, CHUNK)
    costs = simulated.profile().costs
    # A few failures are in any test.
    assert calibrate({"real.json": edited(report, 30, error="INTERNAL")}, costs, CHUNK).notes


def test_a_note_tells_what_is_missing_and_what_was_found() -> None:
    costs = simulated.profile().costs
    local = recorded(0, 2, rate=5.0, count=60)
    notes = calibrate({"real.json": local}, costs, CHUNK, cores=1).notes
    assert notes[0].startswith("real.json: 2 workers were recorded; if more than 1 computed")
    assert notes[1].startswith("prefill steps take the profile's times: fewer than 10 prompts")
    assert notes[2].startswith("decode steps take 1.")
    short = recorded(1, 1, rate=5.0, count=60, answer=(1, 1))
    notes = calibrate({"real.json": short}, costs, CHUNK, cores=2).notes
    assert notes[-1].startswith("decode steps take the profile's times: fewer than 10 gaps")


def test_a_response_with_several_tokens_is_no_step() -> None:
    costs = simulated.profile().costs
    report = recorded(1, 1, rate=5.0, count=100, answer=(20, 40))

    def joined(row: Row) -> Row:
        pairs = zip(row.itl_s[::2], row.itl_s[1::2], strict=False)
        return row if row.index % 2 else replace(row, itl_s=tuple(map(sum, pairs)))

    pairs = replace(report, rows=tuple(map(joined, report.rows)))
    before, after = (
        calibrate({"one": one}, costs, CHUNK).times["decode"] for one in (report, pairs)
    )
    assert after.alone == pytest.approx(before.alone, rel=0.05)


def test_a_stall_of_the_machine_is_no_step() -> None:
    costs = simulated.profile().costs
    report = recorded(1, 1, rate=5.0, count=100, answer=(20, 40))
    row = report.rows[50]
    stalled = replace(row, itl_s=(*row.itl_s[:-1], 60.0))
    rows = (*report.rows[:50], stalled, *report.rows[51:])
    before, after = (
        calibrate({"one": one}, costs, CHUNK).times["decode"]
        for one in (report, replace(report, rows=rows))
    )
    assert after.alone == pytest.approx(before.alone, rel=0.03)
    assert max(after.noise) < 2


# Whose steps take no time.
FREE = simulated.profile(
    **{name: 0.0 for name in simulated.COSTS if name.startswith(("prefill", "decode", "handoff"))}
)
SECONDS = st.floats(0, 1e308) | st.sampled_from([0.0, 1e-9, 0.01, 1.0])
NAMES = ("tokenize", "queue", "reserve", "prefill_queue", "prefill", "return", "emit", "odd")


@st.composite
def rows(draw: st.DrawFn) -> Row:
    worker = st.sampled_from(["", "prefill-0", "decode-0", "decode-1"])
    attempt = Attempt("local", "", draw(worker), draw(worker), "finished", ())
    phases = draw(st.dictionaries(st.sampled_from(NAMES), SECONDS))
    handoff = Handoff("shm", 1, 1, 1, 0, draw(SECONDS), draw(SECONDS), "")
    ledger = Ledger(
        phases=tuple(phases.items()),
        ttft_seconds=draw(SECONDS),
        handoff=draw(st.none() | st.just(handoff)),
        attempts=(attempt,) * draw(st.integers(0, 2)),
    )
    return Row(
        scheduled_s=draw(SECONDS),
        late_s=draw(SECONDS),
        ttft_s=draw(st.none() | SECONDS),
        itl_s=tuple(draw(st.lists(SECONDS, max_size=4))),
        e2e_s=draw(SECONDS),
        prompt_tokens=draw(st.integers(0, 2**40)),
        cached_tokens=draw(st.integers(0, 2**40)),
        output_tokens=draw(st.integers(0, 5)),
        error=draw(st.sampled_from(["", "INTERNAL"])),
        ledger=draw(st.none() | st.just(ledger)),
    )


@given(st.lists(rows(), max_size=40), st.sampled_from([simulated.profile(), FREE]))
@settings(max_examples=100)
def test_any_report_is_read_or_refused(found: list[Row], worker: Profile) -> None:
    try:
        calibration = calibrate({"one": Report({}, (), tuple(found), None)}, worker.costs, CHUNK)
    except InvalidArgument:
        return
    delays = calibration.delays
    for value in (delays.request_s, delays.message_s, delays.handoff_s):
        assert 0 <= value <= 2e6
    for times in calibration.times.values():
        assert 0 < times.alone < float("inf")
        assert all(1 <= one < float("inf") for one in times.beside.values())
        assert all(0 <= one < float("inf") for one in times.noise)
    # A cluster is simulated with whatever was found.
    scenario = Scenario(
        simulated.scenario().config,
        simulated.scenario().pools,
        delays=delays,
        cores=2,
        times=calibration.times,
    )
    assert simulated.run(scenario, simulated.poisson(5.0, 3)).rows
