"""A worker's process: how it ends when it cannot any more."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
from collections.abc import Coroutine
from typing import NoReturn

from kvrelay.engine.parallel.lost import RankLost
from kvrelay.process.loop_stall import LoopStalls
from kvrelay.process.telemetry import flush_logs, get_logger
from kvrelay.worker.step_watch import StepHung

# That the event loop may be away; routers and the actuator turn away from its worker long before
LOOP_S = 60.0
HUNG = 70  # exit code: EX_SOFTWARE of sysexits.h
_LOOK_S = 1.0
_STDERR = 2

log = get_logger("worker")


async def run_in_process(worker_id: str, serving: Coroutine[None, None, None]) -> None:
    """Runs `serving`, which has this process for itself. An engine or an event loop that hangs ends
    the process, with the stacks of all its threads on stderr: nothing else could, since no thread
    can be ended from outside. So does an engine that has lost a rank.
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
            why=str(hung),
        )
        _end()
    except RankLost as lost:
        log.error("engine_rank_lost", worker=worker_id, why=str(lost))
        _end()
    finally:
        guard.cancel()
        stalls.cancel()
        faulthandler.cancel_dump_traceback_later()


def _end() -> NoReturn:
    flush_logs()
    sys.stderr.flush()
    os._exit(HUNG)  # not sys.exit, which waits for the engine thread


async def _guard_the_loop() -> None:
    """As long as the event loop comes by, faulthandler's own thread, which needs no lock of
    Python's, keeps waiting.
    """
    while True:
        faulthandler.dump_traceback_later(LOOP_S, exit=True, file=_STDERR)
        await asyncio.sleep(_LOOK_S)
