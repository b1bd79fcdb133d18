"""What vLLM itself holds, asked in the worker's process and past kvrelay's own counts."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from faults.points import Tell

# Blocks with a reference, requests, and sequences that the connector and the sampler know.
NOTHING_HELD = {"blocks": 0, "requests": 0, "sequences": 0}


def install(tell: Tell) -> None:
    """Tells what vLLM holds whenever SIGUSR2 comes. The test asks when the worker is at rest, so
    vLLM's thread is idle.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    schedulers: list[Any] = []
    start = Scheduler.__init__

    def noted(scheduler: Any, *arguments: Any, **named: Any) -> None:
        start(scheduler, *arguments, **named)
        schedulers.append(scheduler)

    Scheduler.__init__ = noted
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGUSR2, lambda: tell({"in_vllm": _held(schedulers)})
    )


def _held(schedulers: list[Any]) -> dict[str, int]:
    from kvrelay.vllm_engine.exchange import EXCHANGE

    (scheduler,) = schedulers
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    return {
        "blocks": sum(block.ref_cnt > 0 and not block.is_null for block in blocks),
        "requests": len(scheduler.requests),
        "sequences": len(EXCHANGE.sequences),
    }
