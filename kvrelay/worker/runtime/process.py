"""A worker's process, and how it ends when the engine or the event loop hangs."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
from collections.abc import Coroutine
from typing import NoReturn

from kvrelay.engine.parallel.rank_lost import RankLost
from kvrelay.process.loop_stall import LoopStalls
from kvrelay.process.telemetry import flush_logs, get_logger
from kvrelay.worker.steps.step_watch import StepHung

# Seconds that the event loop may be blocked. Routers and the actuator avoid the worker long before.
LOOP_S = 60.0
# Exit code: EX_SOFTWARE of sysexits.h.
HUNG = 70
_POLL_S = 1.0
_STDERR = 2

log = get_logger("worker")


async def run_in_process(worker_id: str, serving: Coroutine[None, None, None]) -> None:
    """Runs `serving`, which owns this process.

    Ends the process if the engine or the event loop hangs, with the stacks of all threads on
    stderr, since a thread cannot be ended from outside. Also ends the process if the engine has
    lost a rank.
    """
    guard = asyncio.create_task(_guard_the_loop())
    stalls = asyncio.create_task(LoopStalls(worker_id).run())
    try:
        await serving
    except StepHung as hung:
        flush_logs()
        faulthandler.dump_traceback(_STDERR, all_threads=True)
        log.error(
            "engine_hung",
            worker=worker_id,
            reason=str(hung),
        )
        _end()
    except RankLost as lost:
        log.error("engine_rank_lost", worker=worker_id, reason=str(lost))
        _end()
    finally:
        guard.cancel()
        stalls.cancel()
        faulthandler.cancel_dump_traceback_later()


def _end() -> NoReturn:
    flush_logs()
    sys.stderr.flush()
    # sys.exit would wait for the engine thread.
    os._exit(HUNG)


async def _guard_the_loop() -> None:
    """Restarts faulthandler's timer while the event loop runs. The timer ends the process after
    LOOP_S without a restart; its own thread needs no Python lock.
    """
    while True:
        faulthandler.dump_traceback_later(LOOP_S, exit=True, file=_STDERR)
        await asyncio.sleep(_POLL_S)
