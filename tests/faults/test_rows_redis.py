"""Redis is killed, flushed, stalled, or takes no writes: row 17."""

from __future__ import annotations

import os
import signal
import time

import pytest
import redis.asyncio
import redis.exceptions
from faults.checkers import Invariant
from faults.fleet import Fleet, record
from faults.history import Case, Evidence, FaultRecord
from faults.prompts import OTHER, PROMPT

from kvrelay.worker.runtime.registration import TTL_S
from router.runtime.driver import FORGET_S

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

LENGTH = 1000  # tokens: the answer lasts until the fault is there
OUTAGE_S = {
    "stalled": 30.0 if os.environ.get("LONG") == "1" else 0.0,
    "read-only": TTL_S + FORGET_S + 1.0,
}


@pytest.mark.parametrize("way", ["killed", "flushed", "stalled", "read-only"])
@pytest.mark.sweep(2)
async def test_row_17_redis(fleet: Fleet, way: str) -> None:
    """Streams go on and new requests are served, where they were placed. Afterwards the workers are
    registered again.

    Where Redis takes no writes, all entries expire, and it lasts until the router would have
    forgotten their workers.
    """
    await fleet.learn(PROMPT, max_tokens=LENGTH)
    await fleet.learn(OTHER)
    async with fleet.case(Invariant.TOKENS, Invariant.ANSWER) as case:
        asked = fleet.ask(case, "row-17!tell@token:5", PROMPT, max_tokens=LENGTH)
        await fleet.reached(asked.history.request_id, "token:5")
        fault = record(case, f"Redis is {way}")
        server = fleet.redis.pid
        async with redis.asyncio.Redis.from_url(fleet.redis.url) as client:
            match way:
                case "flushed":
                    await client.flushall()
                    fault.evidence.append(
                        Evidence(time.monotonic(), f"{await client.dbsize()} keys were left")
                    )
                case "read-only":
                    await client.execute_command("REPLICAOF", "127.0.0.1", "1")  # where nobody is
                    with pytest.raises(redis.exceptions.ReadOnlyError) as refused:
                        await client.set("anything", 1)
                    fault.evidence.append(Evidence(time.monotonic(), str(refused.value)))
                case _:
                    os.kill(server, signal.SIGKILL if way == "killed" else signal.SIGSTOP)
            await served_meanwhile(fleet, case, OUTAGE_S.get(way, 0.0))
            if way in OUTAGE_S:
                await fleet.router.registry_is_away()
            await over(fleet, way, fault, server, client)
        history = await asked.ended()
        assert len(history.attempts) == 1
        await fleet.registered()


async def served_meanwhile(fleet: Fleet, case: Case, seconds: float) -> None:
    """One request after the other, for so long; each stays where it was placed."""
    until = time.monotonic() + seconds
    while True:
        late = await fleet.ask(case, "row-17-late", OTHER).ended()
        assert (late.end.status, len(late.attempts)) == ("length", 1)
        if time.monotonic() >= until:
            return


async def over(
    fleet: Fleet, way: str, fault: FaultRecord, server: int, client: redis.asyncio.Redis
) -> None:
    match way:
        case "killed":
            await fleet.until(lambda: fleet.redis.pid != server, "Redis was started again")
            fault.evidence.append(
                Evidence(time.monotonic(), f"pid {server} became {fleet.redis.pid}")
            )
        case "stalled":
            fault.evidence.append(
                Evidence(time.monotonic(), "the router says that Redis does not answer")
            )
            os.kill(server, signal.SIGCONT)
        case "read-only":
            assert not await fleet.registry.workers(), "their entries have expired"
            await client.execute_command("REPLICAOF", "NO", "ONE")
