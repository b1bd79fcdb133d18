"""Worker processes that start fast: this one imports all that a worker needs, and forks one for
each line on stdin.

A line is a JSON object: number, worker_id, pool, model, redis, config; `announce` and `handoff` are
the HOST:PORT under which routers and prefill workers shall reach the worker (proxies of the
test's), `max_model_len` what it says of itself, `log` a file for its log. On stdout come lines of
JSON as well, each with the number of the line that asked for the worker: its own address, the
points that it reaches (see points.py), its pid, and how it ended.

What may be unusual about a worker: `slow`, how many times as long its steps take; `grace_s`, for
what it runs when it is told to end; `hangs`, that it stops itself (SIGSTOP) before it has begun.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import faults.vllm_pool
from faults.points import Points, Tell, teller

import decode_worker.main
import kvrelay.worker.inbound_kv
import kvrelay.worker.runtime.host
import prefill_worker.main
from kvrelay.config.schema import ClusterConfig
from kvrelay.process.stop_request import StopRequest
from kvrelay.process.telemetry import configure_logging, flush_logs
from kvrelay.state.registry import Registry
from kvrelay.types.workers import WorkerInfo
from kvrelay.worker.runtime.settings import WorkerSettings
from kvrelay.worker.steps.step_thread import StepThread

ENGINE_VARIABLE = "KVRELAY_FAULTS_ENGINE"
STEP_S = 0.002  # at least, of a worker whose steps are slow: nobody feels ten times less than that
_PR_SET_PDEATHSIG = 1


def main() -> None:
    if os.environ.get(ENGINE_VARIABLE) == "vllm":
        _import_vllm()
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    numbers: dict[int, int] = {}  # of orders, by pid
    gc.freeze()  # so that no child copies what all of them share
    pending = b""
    print(json.dumps({"ready": os.getpid()}), flush=True)
    while True:
        readable, _, _ = select.select([0, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            while numbers:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                print(
                    json.dumps({"number": numbers.pop(pid), "ended": status, "pid": pid}),
                    flush=True,
                )
        if 0 in readable:
            data = os.read(0, 2**16)
            if not data:
                return  # the test is over; the children die with this process
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                if pid := os.fork():
                    numbers[pid] = order["number"]
                    print(json.dumps({"number": order["number"], "pid": pid}), flush=True)
                else:
                    _run(order)


def _import_vllm() -> None:
    from kvrelay.vllm_engine.arguments import set_variables

    set_variables()
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401


def _run(order: dict[str, Any]) -> None:
    """The child: a worker, from here to its end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out = os.dup(1)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(0)
    configure_logging("info")
    if order.get("hangs"):
        os.kill(os.getpid(), signal.SIGSTOP)
    code = 1
    try:
        asyncio.run(_serve(order, out))
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        flush_logs()
        sys.stderr.flush()
        os._exit(code)


async def _serve(order: dict[str, Any], out: int) -> None:
    tell = teller(out, order["number"])
    Points(tell, Path(order["log"]).parent).install()
    if os.environ.get(ENGINE_VARIABLE) == "vllm":
        faults.vllm_pool.install(tell)
    _announce(order, tell)
    if "slow" in order:
        _slow_down(order["slow"])
    if "grace_s" in order:
        kvrelay.worker.runtime.host.DRAIN_GRACE_S = order["grace_s"]
    stop = StopRequest()
    stop.install()
    config = ClusterConfig.model_validate(order["config"])
    settings = WorkerSettings(
        order["worker_id"], order["pool"], order["model"], order["redis"], config
    )
    serve = prefill_worker.main.serve if order["pool"] == "prefill" else decode_worker.main.serve
    await serve(settings, stop)


def _announce(order: dict[str, Any], tell: Tell) -> None:
    """Others are told the proxies' addresses, and the test the worker's own."""
    publish, target = Registry.publish_worker, kvrelay.worker.inbound_kv.HandoffTarget
    told: list[str] = []

    async def published(registry: Registry, info: WorkerInfo, *rest: Any, **named: Any) -> None:
        if not told:
            told.append(info.address)
            tell({"address": info.address})
        said = replace(info, address=order["announce"], max_model_len=order["max_model_len"])
        await publish(registry, said, *rest, **named)

    Registry.publish_worker = published  # type: ignore[method-assign]
    if order["pool"] == "decode":
        kvrelay.worker.inbound_kv.HandoffTarget = lambda **fields: target(
            **{**fields, "address": order["handoff"]}
        )  # type: ignore[assignment, misc]


def _slow_down(times: float) -> None:
    """Each step of the engine takes so many times as long."""
    run = StepThread.timed

    async def slowed(engine: StepThread, *work: Any) -> Any:
        began = time.monotonic()
        sampled = await run(engine, *work)
        await asyncio.sleep((times - 1) * max(time.monotonic() - began, STEP_S))
        return sampled

    StepThread.timed = slowed  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
