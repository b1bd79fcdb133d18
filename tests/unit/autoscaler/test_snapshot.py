from __future__ import annotations

from dataclasses import replace

from autoscaler.snapshot import snapshot
from kvrelay.types.control_plane import RouterLoad
from kvrelay.types.workers import PoolName, WorkerInfo, WorkerLoad, WorkerState


def worker(pool: PoolName, number: int, state: WorkerState = "ready", **load: float) -> WorkerInfo:
    name = f"{pool}-{number}"
    return WorkerInfo(
        name,
        pool,
        1,
        state,
        "127.0.0.1:1",
        "demo",
        "00",
        16,
        64,
        "host",
        4096,
        WorkerLoad(**load),  # type: ignore[arg-type]
    )


WORKERS = (
    worker(
        "prefill",
        0,
        waiting=2,
        waiting_tokens=300,
        queue_wait_p95_ms=40.0,
        blocks_total=10,
        blocks_held=1,
    ),
    worker(
        "prefill",
        1,
        waiting=1,
        waiting_tokens=50,
        queue_wait_p95_ms=90.0,
        blocks_total=10,
        blocks_held=2,
    ),
    worker(
        "decode",
        0,
        running=9,
        waiting=3,
        waiting_tokens=30,
        blocks_total=100,
        blocks_held=95,
        blocks_leased=5,
    ),
    worker("decode", 1, "draining", waiting=4, waiting_tokens=40, blocks_total=100, blocks_held=10),
    worker("decode", 2, "starting"),
)
ROUTERS = (
    RouterLoad("a", running=1, waiting=5, waiting_tokens=500, ttft_p95_ms=120.0),
    RouterLoad("b", waiting=7, waiting_tokens=700, ttft_p95_ms=80.0, itl_p95_ms=30.0),
)


def test_prefill_is_measured_by_its_own_queue() -> None:
    seen = snapshot("prefill", 3, WORKERS, ROUTERS)
    assert (seen.size, seen.ready) == (3, 2)
    assert seen.metrics == {
        "queue_depth": 3,
        "queue_tokens": 350,
        "queue_wait_p95_ms": 90.0,
        "kv_occupancy": 0.15,
        "itl_p95_ms": 30.0,
    }, "TTFT has the wait for a batch slot in it, and batch slots are taken by answers"
    idle = tuple(replace(router, waiting=0, waiting_tokens=0) for router in ROUTERS)
    assert snapshot("prefill", 3, WORKERS, idle).metrics["ttft_p95_ms"] == 120.0


def test_decode_is_measured_by_what_waits_in_it_and_before_it() -> None:
    seen = snapshot("decode", 3, WORKERS, ROUTERS)
    assert seen.ready == 1, "neither the draining nor the starting one"
    assert seen.metrics["queue_depth"] == 3 + 4 + 5 + 7
    assert seen.metrics["queue_tokens"] == 30 + 40 + 500 + 700
    assert seen.metrics["kv_occupancy"] == 0.9


def test_prompts_that_wait_at_the_routers_are_the_prefill_pools_queue() -> None:
    """The blocks that are leased to prompts are no load of the decode pool."""
    behind = (
        worker(
            "prefill",
            0,
            waiting=1,
            waiting_tokens=900,
            busy_share=1.0,
            tokens_per_second=500.0,
            queue_wait_p95_ms=90.0,
        ),
        worker("prefill", 1, busy_share=0.5, tokens_per_second=300.0),
        worker(
            "decode",
            0,
            running=2,
            leases=2,
            blocks_total=100,
            blocks_held=90,
            blocks_leased=80,
            busy_share=0.1,
        ),
    )
    routers = (
        replace(ROUTERS[0], waiting_for_prefill=5, waiting_prefill_tokens=600),
        replace(ROUTERS[1], waiting_for_prefill=7, waiting_prefill_tokens=200),
    )
    prefill, decode = (
        snapshot("prefill", 2, behind, routers),
        snapshot("decode", 1, behind, routers),
    )
    assert (prefill.metrics["queue_depth"], prefill.metrics["queue_tokens"]) == (1 + 12, 900 + 800)
    # What the workers compute when they are busy all the time.
    rate = 500 / 1.0 + 300 / 0.5
    assert prefill.metrics["queue_wait_p95_ms"] == 90.0 + 1000 * 800 / rate
    assert (decode.metrics["queue_depth"], decode.metrics["queue_tokens"]) == (0, 1200 - 800)
    limited = (replace(routers[0], waiting=50, waiting_at_limit=45, waiting_tokens_at_limit=100),)
    alone = snapshot("decode", 1, behind, (*limited, routers[1]))
    others = snapshot("decode", 1, behind, (replace(routers[0], waiting=5), routers[1]))
    assert alone.metrics["queue_depth"] == others.metrics["queue_depth"]
    assert alone.metrics["queue_tokens"] == others.metrics["queue_tokens"] - 100
    assert (prefill.metrics["ttft_p95_ms"], decode.metrics["kv_occupancy"]) == (120.0, 0.1)
    assert (prefill.busy_share, decode.busy_share) == (0.75, 0.1)
    # Without prefill workers, decode workers compute the prompts.
    assert snapshot("decode", 1, behind[2:], routers).metrics["queue_depth"] == 12


def test_ttft_says_nothing_of_the_prefill_pool_while_batch_slots_are_short() -> None:
    for waits, is_known in (
        (replace(ROUTERS[0], waiting=7, waiting_for_prefill=3), False),
        (replace(ROUTERS[0], waiting=7, waiting_for_prefill=4), True),
        (replace(ROUTERS[0], waiting=7, waiting_for_prefill=6, waiting_at_limit=1), False),
    ):
        metrics = snapshot("prefill", 2, WORKERS, (waits,)).metrics
        assert ("ttft_p95_ms" in metrics) is is_known


def test_an_empty_prefill_pool_sees_what_waits_elsewhere() -> None:
    decode_only = WORKERS[2:]
    assert snapshot("prefill", 0, decode_only, ROUTERS).metrics["queue_depth"] == 19
    assert "queue_depth" not in snapshot("prefill", 1, decode_only, ROUTERS).metrics, (
        "its worker does not report"
    )


def test_without_a_router_or_a_worker_the_queue_is_not_known() -> None:
    assert "queue_depth" not in snapshot("decode", 3, WORKERS, ()).metrics
    assert snapshot("decode", 3, (), ROUTERS[:1]).metrics == {"ttft_p95_ms": 120.0}
    assert snapshot("decode", 0, (), ROUTERS).metrics["queue_depth"] == 12


def test_latencies_are_zero_when_idle_and_unknown_when_nothing_comes_out() -> None:
    idle = snapshot("decode", 1, WORKERS, (RouterLoad("a"),))
    assert idle.metrics["ttft_p95_ms"] == idle.metrics["itl_p95_ms"] == 0.0
    stuck = snapshot("decode", 1, WORKERS, (RouterLoad("a", waiting=1),))
    assert "ttft_p95_ms" not in stuck.metrics
