from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidArgument
from kvrelay.loadtest import recording
from kvrelay.loadtest.recording import LATENCY_WINDOW_S, moments_of, read_moments
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.series import token_gaps
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.report.timeline import PoolSample, Sample, Timeline
from kvrelay.percentiles import percentile

HEADER = "seconds,pool,size,ready,queue_depth,kv_occupancy\n"


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "metrics.csv"
    file.write_text(text)
    return file


def test_a_csv_file_gives_a_moment_for_each_time(tmp_path: Path) -> None:
    rows = "0,prefill,1,1,0,\n0,decode,2,1,3,0.5\n2.5,decode,2,2,4,0.75\n"
    first, second = read_moments(write(tmp_path, HEADER + rows))
    assert first.at == 0
    assert first.pools["prefill"].metrics == {"queue_depth": 0.0}, "an empty field is not known"
    assert (first.pools["decode"].size, first.pools["decode"].ready) == (2, 1)
    assert (second.at, second.pools["decode"].metrics) == (
        2.5,
        {"queue_depth": 4.0, "kv_occupancy": 0.75},
    )


def test_a_csv_file_may_have_the_utilisation(tmp_path: Path) -> None:
    text = "seconds,pool,busy_share,size,ready,queue_depth\n0,decode,0.75,2,2,1\n1,decode,,2,2,1\n"
    first, second = read_moments(write(tmp_path, text))
    assert first.pools["decode"].busy_share == 0.75
    assert second.pools["decode"].busy_share is None


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (
            "",
            ":1: the columns are ; expected seconds, pool, size, ready, optionally busy_share, and "
            "some of queue_depth",
        ),
        ("seconds,pool,size,ready,busy_share\n", ":1: the columns"),
        ("seconds,pool,size,ready,busy_share,busy_share,queue_depth\n", ":1: the columns"),
        (
            "busy_share," + HEADER + "70,0,decode,1,1,0,0\n",
            ":2: busy_share is 70; a share is 0 to 1, or empty if unknown",
        ),
        ("busy_share," + HEADER + "nan,0,decode,1,1,0,0\n", ":2: busy_share is nan"),
        ("busy_share," + HEADER + "all,0,decode,1,1,0,0\n", ":2: the row does not match"),
        ("seconds,pool,size,ready\n", ":1: the columns"),
        ("seconds,pool,size,ready,queue_length\n", ":1: the columns"),
        (HEADER, "the file has no rows"),
        (HEADER + "0,decode,1,1,0\n", ":2: the row does not match"),
        (HEADER + "0,router,1,1,0,0\n", ":2: the row does not match"),
        (HEADER + "0,decode,1,1,many,0\n", ":2: the row does not match"),
        (HEADER + "1,decode,1,1,0,0\n0,decode,1,1,0,0\n", ":3: seconds must not decrease"),
        (HEADER + "nan,decode,1,1,0,0\n", ":2: seconds"),
        (
            HEADER + "0,decode,-1,1,0,0\n",
            ":2: seconds must not decrease, and sizes must be 0 or more",
        ),
    ],
)
def test_a_csv_file_that_is_none_is_refused_with_its_line(
    tmp_path: Path, text: str, where: str
) -> None:
    with pytest.raises(InvalidArgument, match=where.replace("?", r"\?")):
        read_moments(write(tmp_path, text))


def report(*samples: Sample) -> Report:
    rows = (
        Row(0.0, 0.0, ttft_s=0.5, itl_s=(0.1, 0.2), e2e_s=0.8),
        Row(30.0, 0.0, ttft_s=2.0, e2e_s=2.0),
    )
    return Report({}, (), rows, Timeline(samples) if samples else None)


def sample(at: float, running: int = 1, answers: int = 5) -> Sample:
    pool = PoolSample(
        workers=1,
        desired=2,
        running=answers,
        waiting=3,
        waiting_tokens=700,
        kv_share=0.25,
        tokens_per_second=9,
        busy_share=0.5,
        leased_share=0.125,
    )
    return Sample(at, running, waiting=4, pools={"prefill": pool, "decode": pool})


def test_a_load_tests_timeline_and_its_rows_are_the_record() -> None:
    early, silent, late, idle = moments_of(
        report(sample(1.0), sample(25.0), sample(33.0), sample(60.0, running=0))
    )
    assert early.pools["prefill"].metrics["queue_tokens"] == 700
    assert early.pools["prefill"].metrics["queue_depth"] == 3
    assert early.pools["decode"].metrics["queue_depth"] == 7, (
        "what waits in the router waits for decode"
    )
    assert early.pools["decode"].metrics["kv_occupancy"] == 0.125, (
        "without what is kept for prompts"
    )
    assert early.pools["decode"].busy_share == 0.5
    assert (early.pools["decode"].size, early.pools["decode"].ready) == (2, 1)
    assert early.pools["decode"].metrics["ttft_p95_ms"] == pytest.approx(500)
    assert early.pools["decode"].metrics["itl_p95_ms"] == pytest.approx(200)
    assert "ttft_p95_ms" not in silent.pools["decode"].metrics, "nobody knows while all wait"
    assert late.pools["decode"].metrics["ttft_p95_ms"] == pytest.approx(2000)
    assert "itl_p95_ms" not in late.pools["decode"].metrics
    assert "itl_p95_ms" not in idle.pools["decode"].metrics, "four still wait"


class Counted(list[tuple[float, float]]):
    """A list that counts its readings."""

    readings = 0

    def __iter__(self) -> Iterator[tuple[float, float]]:
        self.readings += 1
        return super().__iter__()


def test_the_measurements_are_read_once_however_many_samples_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Counted] = []

    def gaps(rows: Sequence[Row]) -> Counted:
        found.append(Counted(token_gaps(rows)))
        return found[-1]

    monkeypatch.setattr(recording, "token_gaps", gaps)
    assert len(moments_of(report(*(sample(float(at)) for at in range(50))))) == 50
    assert [one.readings for one in found] == [1]


@given(
    rows=st.lists(st.tuples(st.floats(0, 60), st.floats(0, 20)), max_size=20),
    at=st.floats(0, 80),
)
def test_a_percentile_is_of_the_first_tokens_of_the_last_seconds(
    rows: list[tuple[float, float]], at: float
) -> None:
    answers = tuple(Row(due, 0.0, ttft_s=ttft, e2e_s=ttft) for due, ttft in rows)
    (moment,) = moments_of(Report({}, (), answers, Timeline((sample(at),))))
    recent = sorted(ttft for due, ttft in rows if at - LATENCY_WINDOW_S < due + ttft <= at)
    expected = 1000 * percentile(recent, 95) if recent else None
    assert moment.pools["decode"].metrics.get("ttft_p95_ms") == expected


def test_prompts_that_wait_in_the_router_wait_for_prefill() -> None:
    (moment,) = moments_of(report(replace(sample(1.0), waiting_for_prefill=4)))
    assert [moment.pools[pool].metrics["queue_depth"] for pool in ("prefill", "decode")] == [7, 3]


def test_a_report_without_a_timeline_says_how_to_get_one() -> None:
    with pytest.raises(InvalidArgument, match="--admin"):
        moments_of(report())
