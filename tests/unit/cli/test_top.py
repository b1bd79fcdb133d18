"""The picture of `kvrelay top`, and what it does when the router is away."""

from __future__ import annotations

import io
from dataclasses import replace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.scripted_router import serving

from kvrelay.cli.status import looks
from kvrelay.cli.views.render import status_view
from kvrelay.cli.views.top_view import bar, full_screen, rows_that_fit, top_view
from kvrelay.client.connection import OPEN
from kvrelay.errors import Unavailable
from kvrelay.types.control_plane import RouterLoad, ScalingDecision
from kvrelay.types.workers import PendingWorker, WorkerLoad
from kvrelay.wire import cluster as wire

LOAD = WorkerLoad(
    running=12,
    waiting=345,
    blocks_total=200,
    blocks_held=150,
    tokens_per_second=1234.5,
    rss_bytes=2**30,
)
STATUS = wire.ClusterStatus(
    model="demo",
    state="ready",
    pools=(
        wire.PoolStatus(
            "prefill",
            1,
            (wire.WorkerStatus("prefill-0", "prefill", 7, "ready", "127.0.0.1:1", LOAD),),
        ),
        wire.PoolStatus(
            "decode",
            2,
            (
                wire.WorkerStatus("decode-0", "decode", 8, "starting", "127.0.0.1:2", WorkerLoad()),
                wire.WorkerStatus(
                    "decode-1",
                    "decode",
                    9,
                    "ready",
                    "127.0.0.1:3",
                    replace(LOAD, integrity_ok=False),
                ),
            ),
        ),
    ),
    decisions=tuple(
        ScalingDecision(
            1_700_000_000.0 - age, "decode", 1, 2, f"queue_depth {age} over 4 [b]" + 80 * "x"
        )
        for age in range(9)
    ),
    router=RouterLoad(
        "router-0", running=5, waiting=1, finished=40, failed=2, ttft_p95_ms=12.34, itl_p95_ms=None
    ),
    block_bytes=1024,
    block_size=16,
    registry="ok",
    pending=(
        PendingWorker(
            "decode-2", "decode", "no Ray node has room for CPU 1: " + "10.0.0.1 has none, " * 9
        ),
    ),
)


def busy(prefill: int, decode: int) -> wire.ClusterStatus:
    pools = [
        replace(
            pool,
            workers=tuple(
                replace(pool.workers[0], worker_id=f"{pool.name}-{n}") for n in range(count)
            ),
        )
        for pool, count in zip(STATUS.pools, (prefill, decode), strict=True)
    ]
    return replace(STATUS, pools=tuple(pools), pending=())


def shown(status: wire.ClusterStatus, trouble: str = "", width: int = 80) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, markup=False, force_terminal=True, color_system=None)
    console.print(top_view(status, trouble, width))
    return out.getvalue()


def test_a_narrow_terminal_shows_each_worker_with_its_state() -> None:
    text = shown(STATUS, width=40)
    assert all(len(line) <= 40 for line in text.splitlines())
    rows = [line.split() for line in text.splitlines()]
    assert ["prefill-0", "ready", "12", "345", "75%"] in rows
    assert ["decode-0", "starting", "0", "0", "0%"] in rows
    assert ["decode-1", "BROKEN", "12", "345", "75%"] in rows


@pytest.mark.parametrize("width", [80, 120, 200])
def test_everything_fits(width: int) -> None:
    text = shown(STATUS, width=width)
    assert all(len(line) <= width for line in text.splitlines())
    for words in (
        *(
            "kvrelay demo",
            "5 running, 1 waiting",
            "40 finished, 2 failed",
            "p95 TTFT 12.3 ms",
            "ITL -",
        ),
        *(
            "prefill  1 ready of 1",
            "decode  1 ready of 2",
            "prefill-0",
            "decode-1",
            "BROKEN",
            "1,234.5",
            "75%",
            "345",
            "1 GiB",
        ),
        *("decode-2 is pending: no Ray node has room for CPU 1",),
        *("prefill 1,234.5 tok/s   decode 1,234.5 tok/s", "1 → 2", "queue_depth 4 over 4 [b]"),
    ):
        assert words in text, words
    assert "queue_depth 5" not in text
    assert len(text.splitlines()) < 40


@pytest.mark.parametrize("width", [40, 80])
def test_nothing_moves_when_the_numbers_grow(width: int) -> None:
    """Each line is in its place, and each column has its width, whatever the load is."""

    def at(scale: int) -> wire.ClusterStatus:
        load = replace(
            LOAD,
            running=scale,
            waiting=scale,
            tokens_per_second=5731.6 * scale / 99,
            rss_bytes=1100 * 2**20,
        )
        pools = tuple(
            replace(pool, workers=tuple(replace(one, load=load) for one in pool.workers))
            for pool in STATUS.pools
        )
        router = RouterLoad(
            "router-0",
            running=scale,
            waiting=scale,
            waiting_for_prefill=scale,
            finished=27 * scale,
            failed=scale,
            ttft_p95_ms=12.0 * scale,
            itl_p95_ms=9.0 * scale,
        )
        return replace(STATUS, pools=pools, router=router, pending=())

    idle, busy = (shown(at(scale), width=width).splitlines() for scale in (0, 99))
    assert len(idle) == len(busy)
    for before, after in zip(idle, busy, strict=True):
        if "worker " in before:
            assert before == after, "the head of a pool's table"
        assert (before[:2] == "│ ") == (after[:2] == "│ ")


def test_the_last_line_of_the_screen_is_the_hint() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, height=12, force_terminal=True, color_system=None)
    console.print(full_screen(top_view(STATUS), "q: quit"))
    lines = out.getvalue().splitlines()
    assert len(lines) == 12
    assert lines[-1].strip() == "q: quit"


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (4, 6), (1, 500), (0, 9), (100, 100)])
@pytest.mark.parametrize(("width", "height"), [(80, 23), (40, 26), (120, 23), (80, 60)])
@pytest.mark.sweep(4)
def test_a_screen_of_few_lines_counts_the_workers_that_it_leaves_out(
    prefill: int, decode: int, width: int, height: int
) -> None:
    out = io.StringIO()
    status = busy(prefill, decode)
    Console(file=out, width=width).print(top_view(status, width=width, height=height))
    lines = out.getvalue().splitlines()
    assert len(lines) <= height
    assert sum("1 → 2" in line for line in lines) >= 2, "decisions stay"
    for pool, count in (("prefill", prefill), ("decode", decode)):
        rows = sum(line.split()[:1] == [f"{pool}-{n}"] for line in lines for n in range(count))
        state = "ready" if pool == "prefill" else "starting"
        told = f"+{count - rows} more: {count - rows} {state}"
        assert (told in (line.strip() for line in lines)) is (rows < count)
        assert rows > 0 or count == 0
    if height == 60:
        assert prefill + decode > 30 or not any("more:" in line for line in lines)


@given(st.lists(st.integers(0, 30), max_size=2), st.integers(0, 40))
def test_no_more_rows_would_fit(workers: list[int], lines: int) -> None:
    def needed(most: int) -> int:
        return sum(min(count, most) + (count > most) for count in workers)

    most = rows_that_fit(workers, lines)
    assert needed(most) <= lines or most == 0
    assert most == max(workers, default=0) or needed(most + 1) > lines


def test_the_model_of_several_is_told() -> None:
    several = replace(STATUS, models=("demo", "large"))
    assert "kvrelay demo (1 of 2 models)" in shown(several, width=40)
    assert "models" not in shown(replace(STATUS, models=("demo",)))


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize(
    ("processes", "told"),
    [
        (1, "router of 1 process, 1.5 GiB"),
        (4, "router of 4 processes, 1.5 GiB"),
        # An older router does not say how many it has.
        (0, "router, 1.5 GiB"),
    ],
)
def test_the_processes_of_the_router_are_told(processes: int, told: str, width: int) -> None:
    router = replace(STATUS.router, processes=processes, rss_bytes=1536 * 2**20)
    status = replace(STATUS, router=router)
    assert f" {told} " in shown(status, width=width)
    out = io.StringIO()
    Console(file=out, width=width).print(status_view(status, width))
    assert told in " ".join(out.getvalue().split())


def test_without_decisions_the_view_says_so() -> None:
    assert "No scaling decision yet." in shown(replace(STATUS, decisions=()))


def test_what_a_delay_holds_back_is_one_line() -> None:
    held = ScalingDecision(1.0, "prefill", 1, 4, "queue_depth 8" + 80 * "x")
    lines = [
        line for line in shown(replace(STATUS, delayed=(held,))).splitlines() if "1 → 4" in line
    ]
    assert [line.split()[:5] for line in lines] == [["delayed", "prefill", "1", "→", "4"]]


def test_what_is_not_of_now_says_so() -> None:
    assert "last known state, retrying: cannot connect" in shown(STATUS, "cannot connect")
    assert "registry: Redis is away" in shown(replace(STATUS, registry="Redis is away"))


@pytest.mark.parametrize(
    ("share", "filled", "label"), [(0.0, 0, "0%"), (0.5, 6, "50%"), (1.0, 12, "100%")]
)
def test_bar(share: float, filled: int, label: str) -> None:
    text = bar(share).plain
    assert text.count("█") == filled
    assert text.count("█") + text.count("░") == 12
    assert text.endswith(label)


class Leaving(wire.ClusterServiceServicer):
    """Says its status once to each who watches, and ends the stream."""

    async def WatchStatus(
        self, request: wire.pb.WatchStatusRequest, context: grpc.aio.ServicerContext
    ) -> None:
        await context.write(wire.cluster_status_to_proto(STATUS))


def test_a_router_that_went_away_is_asked_again() -> None:
    with serving(Leaving()) as admin:
        seen = looks(admin, 0.01, OPEN)
        assert next(seen) == (STATUS, "")
        assert next(seen) == (STATUS, f"{admin}: the router is shutting down")
        assert next(seen) == (STATUS, ""), "it is back"
        assert next(seen)[1]
    status, trouble = next(seen)
    assert status == STATUS
    assert "cannot connect" in trouble


def test_one_that_never_was_there_is_an_error() -> None:
    with serving(Leaving()) as admin:
        pass
    with pytest.raises(Unavailable, match="cannot connect"):
        next(looks(admin, 0.01, OPEN))
