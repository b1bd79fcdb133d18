"""Metrics that nobody knows, a start that hangs, load that flaps: row 22. The production autoscaler
and actuator.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import redis.asyncio
from faults.cancels import filled
from faults.checkers import Invariant
from faults.fleet import record
from faults.history import Evidence
from faults.launcher import INTERVAL_S, FleetLauncher
from faults.prompts import LONG, OTHER
from structlog.testing import capture_logs

import autoscaler.loop
import autoscaler.worker_watch
from autoscaler.lease import Lease
from autoscaler.pool_sizes import Verdicts, decide_pools
from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.state.registry_keys import RegistryKeys

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

LOOKS = 10  # that nothing may change for
QUEUE = [{"name": "queue_depth", "target": 1}]
LENGTH = 1000  # tokens
WAITING = 9  # more than a third worker takes


@asynccontextmanager
async def autoscaled(
    launcher: FleetLauncher, monkeypatch: pytest.MonkeyPatch, **decode: Any
) -> AsyncIterator[list[Verdicts]]:
    """While the autoscaler runs; what it found at each look."""
    looks: list[Verdicts] = []

    def noted(*seen: Any) -> Verdicts:
        looks.append(decide_pools(*seen))
        return looks[-1]

    monkeypatch.setattr(autoscaler.loop, "decide_pools", noted)
    policy = AutoscalingPolicy.model_validate({"decode": decode, "interval_s": INTERVAL_S})
    lease = Lease(launcher.fleet.registry, "the-test", sole=True)
    await lease.renew()
    parts = (lease.run(), autoscaler.loop.Autoscaler(launcher.fleet.registry, policy, lease).run())
    running = asyncio.gather(*parts)
    try:
        yield looks
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await lease.release()  # the next test has another one


def reasons(looks: list[Verdicts]) -> list[str]:
    return [one["decode"][0].reason for one in looks]


async def test_row_22_metrics_that_are_stale_or_not_a_number(
    launcher: FleetLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size stays while nobody knows whether there is load, and shrinks once it is known that
    there is none.
    """
    fleet = launcher.fleet
    await fleet.learn(OTHER)
    async with (
        fleet.case(Invariant.TOKENS, Invariant.ANSWER) as case,
        redis.asyncio.Redis.from_url(fleet.redis.url) as client,
    ):
        (key,) = [one async for one in client.scan_iter(f"{RegistryKeys().router}*")]
        router = fleet.router.child.process.pid
        os.kill(router, signal.SIGSTOP)
        fault = record(case, "the router tells nothing, and then rubbish", *fleet.pool("decode"))
        entry = json.loads(await client.get(key) or b"")
        with capture_logs() as logs:
            shrinks = {
                "min_replicas": 1,
                "max_replicas": 3,
                "metrics": QUEUE,
                "downscale_delay_s": 0,
            }
            entry["value"]["waiting"] = entry["value"]["ttft_p95_ms"] = float("nan")
            await client.set(key, json.dumps(entry))
            async with autoscaled(launcher, monkeypatch, **shrinks) as looks:
                await fleet.until(lambda: len(looks) > LOOKS, "it has looked at the rubbish")
                fault.evidence += [
                    Evidence(time.monotonic(), str(one))
                    for one in logs
                    if "skipped" in one["event"]
                ]
                await client.delete(key)  # as it expires
                await fleet.until(lambda: len(looks) > 2 * LOOKS, "it has looked at nothing")
                assert set(reasons(looks)) == {"no metric is known"}
                assert (await fleet.registry.desired())["decode"] == len(fleet.pool("decode")) == 2
                assert len(fault.evidence) == 1, "it is warned of once"
                os.kill(router, signal.SIGCONT)
                await fleet.until(lambda: len(fleet.pool("decode")) == 1, "the pool shrinks")
            fleet.ask(case, "row-22", OTHER)
    await launcher.resize(decode=2)


async def test_row_22_a_start_that_hangs(
    launcher: FleetLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up, counted as one until then, and another comes in its place."""
    fleet = launcher.fleet
    await fleet.learn(OTHER)
    async with fleet.case(Invariant.TOKENS, Invariant.ANSWER) as case:
        launcher.hangs = True
        launcher.most["decode"] = 0
        async with autoscaled(launcher, monkeypatch, min_replicas=3, max_replicas=3):
            await fleet.until(lambda: len(fleet.pool("decode")) == 3, "one more is started")
            hung = fleet.pool("decode")[-1]
            await fleet.until(lambda: hung.pid and hung.frozen, f"{hung.worker_id} is stopped")
            fault = record(case, "a start that hangs", hung)
            fault.evidence.append(Evidence(time.monotonic(), f"/proc/{hung.pid}/stat says T"))
            fleet.ask(case, "beside", OTHER, bystander=True)
            with monkeypatch.context() as patched:
                patched.setattr(autoscaler.worker_watch, "START_S", LOOKS * INTERVAL_S)
                await fleet.until(lambda: not hung.alive, f"{hung.worker_id} is given up")
            await launcher.are(decode=3)
            assert launcher.most["decode"] == 3
    assert hung.status == signal.SIGKILL
    await launcher.resize(decode=2)


async def test_row_22_load_that_flaps(
    launcher: FleetLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests wait, leave, and come again: the pool grows once, to its bound, and stays there."""
    fleet = launcher.fleet
    await fleet.learn(OTHER)
    began = time.time()
    async with fleet.case(Invariant.BLOCKS) as case:
        fault = record(case, "load that flaps")
        launcher.most["decode"] = 0
        policy = {
            "min_replicas": 1,
            "max_replicas": 3,
            "metrics": QUEUE,
            "upscale_delay_s": 0,
            "downscale_delay_s": 60,
        }
        async with (
            filled(fleet, case, "joined"),
            autoscaled(launcher, monkeypatch, **policy) as looks,
        ):
            await fleet.until(lambda: looks, "a look")
            for _ in range(2):
                for count, depth in ((WAITING, "queue_depth [1-9]"), (0, "queue_depth 0")):
                    asked = [
                        fleet.ask(case, "row-22", LONG, max_tokens=LENGTH) for _ in range(count)
                    ]
                    await fleet.until(lambda: re.match(depth, reasons(looks)[-1]), depth)  # noqa: B023
                    fault.evidence.append(
                        Evidence(time.monotonic(), f"the autoscaler saw {reasons(looks)[-1]}")
                    )
                    for one in asked:
                        one.cancel()
                        await one.ended()
            await fleet.until(lambda: len(fleet.pool("decode")) == 3, "the pool has grown")
    decisions = [one for one in await fleet.registry.decisions() if one.unix_time > began]
    assert [(one.before, one.after) for one in decisions] == [(2, 3)]
    assert launcher.most["decode"] == 3
    await launcher.resize(decode=2)
