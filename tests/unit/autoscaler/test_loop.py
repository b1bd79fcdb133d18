from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from autoscaler.lease import DEADLINE_S, Lease
from autoscaler.loop import Autoscaler
from autoscaler.scaling_policy import Foreseen
from kvrelay.clock import ManualClock
from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.errors import Unavailable
from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.state.registry import Registry
from kvrelay.types.control_plane import RouterLoad
from kvrelay.types.workers import PoolName, WorkerInfo, WorkerLoad

POLICY = AutoscalingPolicy.model_validate(
    {
        "decode": {
            "min_replicas": 1,
            "max_replicas": 10,
            "metrics": [{"name": "queue_depth", "target": 4}],
            "upscale_delay_s": 0,
            "downscale_delay_s": 30,
        },
        "interval_s": 0.1,
    }
)


async def publish(registry: Registry, waiting: int) -> None:
    load = WorkerLoad(waiting=waiting)
    await registry.publish_worker(
        WorkerInfo(
            "decode-0",
            "decode",
            1,
            "ready",
            "127.0.0.1:1",
            "demo",
            "00",
            16,
            64,
            "host",
            4096,
            load,
        ),
        ttl_s=600,
    )
    await registry.publish_router(RouterLoad("router-0"), ttl_s=600)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class Leading(Autoscaler):
    """One whose lease is renewed before each look."""

    async def tick(self) -> None:
        with suppress(Unavailable):
            await self._lease.renew()
        await super().tick()


@pytest.fixture
def autoscaler(registry: Registry, clock: ManualClock) -> Autoscaler:
    return leading(registry, clock)


def leading(
    registry: Registry, clock: ManualClock, policy: AutoscalingPolicy = POLICY
) -> Autoscaler:
    return Leading(registry, policy, Lease(registry, "a", clock, sole=True), clock)


async def test_scales_and_records_why(registry: Registry, autoscaler: Autoscaler) -> None:
    await registry.set_desired({"prefill": 1, "decode": 1})
    await publish(registry, waiting=37)
    await autoscaler.tick()
    assert await registry.desired() == {"prefill": 1, "decode": 3}, (
        "a pool without a policy keeps its size"
    )
    (decision,) = await registry.decisions()
    assert (decision.pool, decision.before, decision.after) == ("decode", 1, 3)
    assert (
        decision.reason
        == "queue_depth 37 over 1 worker / target 4 → 10, limited to +2 by max_step_up"
    )


async def test_tells_what_a_delay_holds_back(registry: Registry, clock: ManualClock) -> None:
    rules = {"metrics": [{"name": "queue_depth", "target": 4}], "max_replicas": 9}
    policy = AutoscalingPolicy.model_validate({"decode": {**rules, "upscale_delay_s": 20}})
    autoscaler = leading(registry, clock, policy)
    await registry.set_desired({"decode": 1})
    await publish(registry, waiting=8)
    await autoscaler.tick()
    (delayed,) = await registry.delayed()
    assert (delayed.pool, delayed.before, delayed.after) == ("decode", 1, 2)
    assert delayed.reason.endswith("not yet for upscale_delay_s 20")
    clock.advance(20.0)
    await autoscaler.tick()
    assert await registry.delayed() == ()
    assert (await registry.decisions())[0].after == 2


async def test_records_nothing_while_nothing_changes(
    registry: Registry, autoscaler: Autoscaler
) -> None:
    await registry.set_desired({"decode": 1})
    await publish(registry, waiting=4)
    for _ in range(3):
        await autoscaler.tick()
    assert await registry.decisions() == ()


async def test_goes_on_from_an_operators_size(
    registry: Registry, autoscaler: Autoscaler, clock: ManualClock
) -> None:
    await registry.set_desired({"decode": 1})
    await publish(registry, waiting=0)
    await autoscaler.tick()
    clock.advance(100.0)
    await registry.set_desired({"decode": 5})
    for _ in range(3):
        await autoscaler.tick()
        clock.advance(10.0)
    assert await registry.desired() == {"decode": 5}
    clock.advance(30.0)
    await autoscaler.tick()
    assert await registry.desired() == {"decode": 4}


async def test_only_the_leader_scales(registry: Registry, autoscaler: Autoscaler) -> None:
    await registry.set_desired({"decode": 1})
    await publish(registry, waiting=37)
    other = Lease(registry, "another", sole=True)
    await other.renew()
    await Autoscaler.tick(autoscaler)
    assert await registry.desired() == {"decode": 1}
    await other.release()
    await autoscaler.tick()
    assert await registry.desired() == {"decode": 3}


async def test_a_poll_ends_with_the_lease(
    registry: Registry, autoscaler: Autoscaler, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis may forget whoever led since, so the claim alone does not keep an old decision from
    being written.
    """
    await registry.set_desired({"decode": 1})
    await publish(registry, waiting=37)
    read = registry.desired

    async def slow() -> dict[PoolName, int]:
        await asyncio.sleep(0.1)
        return await read()

    monkeypatch.setattr(registry, "desired", slow)
    await autoscaler._lease.renew()
    clock.advance(DEADLINE_S - 0.05)
    with pytest.raises(Unavailable, match="the lease of controller a expired"):
        await Autoscaler.tick(autoscaler)
    assert await read() == {"decode": 1}
    await autoscaler.tick()
    assert await read() == {"decode": 3}


async def test_a_recommendation_does_not_last_while_nothing_polls(
    registry: Registry, clock: ManualClock
) -> None:
    patient = POLICY.model_copy(
        update={"decode": POLICY.decode.model_copy(update={"upscale_delay_s": 60.0})}
        if POLICY.decode
        else {}
    )
    autoscaler = leading(registry, clock, patient)
    await registry.set_desired({"decode": 1})
    await publish(registry, waiting=37)

    await autoscaler.tick()
    clock.advance(61.0)
    await Autoscaler.tick(autoscaler)  # the lease has ended
    await autoscaler.tick()
    assert await registry.desired() == {"decode": 1}, "another led in between"

    await registry._call("REPLICAOF", "127.0.0.1", "1")
    clock.advance(61.0)
    await autoscaler.tick()  # the lease is not renewed
    await registry._call("REPLICAOF", "NO", "ONE")
    await autoscaler.tick()
    assert await registry.desired() == {"decode": 1}, "Redis was read-only in between"

    clock.advance(61.0)
    await autoscaler.tick()
    assert await registry.desired() == {"decode": 3}


async def test_a_pool_that_nobody_reports_on_keeps_its_size(
    registry: Registry, autoscaler: Autoscaler, clock: ManualClock
) -> None:
    await registry.set_desired({"decode": 4})
    for _ in range(5):
        await autoscaler.tick()
        clock.advance(60.0)
    assert await registry.desired() == {"decode": 4}


async def test_the_other_metrics_go_on_without_the_look_ahead(
    registry: Registry, clock: ManualClock
) -> None:
    class Broken:
        def foresee(self, *_: object) -> dict[PoolName, Foreseen]:
            raise KeyError("broken")

    autoscaler = leading(registry, clock, POLICY)
    autoscaler._look_ahead = Broken()  # type: ignore[assignment]
    await registry.set_desired({"decode": 1})
    await publish(registry, waiting=37)
    with capture_logs() as logs:
        for _ in range(3):
            await autoscaler.tick()
            clock.advance(61.0)
    assert await registry.desired() != {"decode": 1}
    assert [one["event"] for one in logs].count("look_ahead_failed") == 1


async def test_runs_through_an_outage_and_gives_up_the_lead_at_the_end() -> None:
    async with (
        EmbeddedRedis() as server,
        await Registry.connect(server.url) as registry,
        await Registry.connect(server.url) as other,
    ):
        lease = Lease(registry, "a", sole=True)
        await lease.renew()
        parts = [
            asyncio.create_task(one)
            for one in (lease.run(), Autoscaler(registry, POLICY, lease).run())
        ]
        await other._call("REPLICAOF", "127.0.0.1", "1")  # read-only
        await asyncio.sleep(0.05)
        await other._call("REPLICAOF", "NO", "ONE")
        await other.set_desired({"decode": 1})
        await publish(other, waiting=37)
        async with asyncio.timeout(60):
            while True:
                if (await other.desired())["decode"] > 1:
                    break
                await asyncio.sleep(0.01)
        for one in parts:
            one.cancel()
        await asyncio.wait(parts)  # the lease is given back
        assert (await other.renew_lease("b", 0)).owner == "b"
