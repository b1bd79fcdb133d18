"""An engine or an event loop that hangs is seen, told of, and ended with its process."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import pytest
from support.worker_harness import Session, workers

from kv_transfer.blocks.block_copy import without_kernel
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.base.step_input import OnLayer
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.sampler import Sampled
from kvrelay.engine.sequence_segment import Segment
from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.state.registry import Registry
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.types.workers import WorkerInfo
from kvrelay.worker.runtime import process
from kvrelay.worker.steps import step_watch
from kvrelay.worker.steps.engine_thread import EngineThread
from kvrelay.worker.steps.step_watch import StepHung
from kvrelay.worker_messages import Refused, RunLocal

CONFIG = ClusterConfig.model_validate(
    {
        "model": {"dtype": "float32"},
        "kv": {"block_size": 8, "memory": "4MiB"},
        "decode": {"max_batch": 4},
    }
)
PROMPT = tuple(range(2, 63))
SPEC = SequenceSpec(
    "a", 0, PROMPT, len(PROMPT), SamplingParams(temperature=0.0, max_tokens=4, seed=1)
)


async def until_state(registry: Registry, state: str) -> WorkerInfo:
    async with asyncio.timeout(60):
        while True:
            for info in await registry.workers():
                if info.state == state:
                    return info
            await asyncio.sleep(0.05)


async def test_a_worker_is_ready_once_the_kernel_of_hand_offs_is_compiled(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a new machine the first hand-off would wait for the compiler."""
    compiled: list[EngineThread] = []
    warm_up = EngineThread.warm_up

    async def after_the_kernel(engine: EngineThread) -> None:
        assert without_kernel.cache_info().currsize, "compiled, or known to be unavailable"
        compiled.append(engine)
        await warm_up(engine)

    without_kernel.cache_clear()
    monkeypatch.setattr(EngineThread, "warm_up", after_the_kernel)
    async with workers(tiny_model(), CONFIG, "decode-0"):
        assert compiled


async def test_a_step_that_hangs_ends_its_sessions_and_its_worker(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    run = ModelRunner.run

    def hanging(
        runner: ModelRunner, segments: Sequence[Segment], on_layer: OnLayer | None = None
    ) -> list[list[Sampled]]:
        if len(segments[0].token_ids) == len(PROMPT):
            released.wait()
        return run(runner, segments, on_layer)

    monkeypatch.setattr(ModelRunner, "run", hanging)
    monkeypatch.setattr(step_watch, "LEAST_S", 1.0)

    async def ask() -> None:
        async with workers(tiny_model("llama"), CONFIG, "decode-0") as running:
            decode = await running.session("decode-0")
            await decode.send(RunLocal(SPEC))
            with pytest.raises(
                grpc.aio.AioRpcError, match="decode-0 cannot continue: a step of 61 tokens"
            ):
                await decode.event()  # an error, since it may be the request's fault
            stuck = await until_state(running.registry, "stuck")
            assert not stuck.load.empty, (
                "it has let go of nothing that its engine may still write to"
            )
            await asyncio.Event().wait()  # the worker's end ends this

    try:
        with pytest.raises(ExceptionGroup) as caught:
            await ask()
    finally:
        released.set()
    assert caught.group_contains(StepHung, match=r"a step of 61 tokens has run for [1-9]")


async def test_a_worker_is_given_no_work_before_its_first_real_steps(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    computing, released = threading.Event(), threading.Event()
    run = ModelRunner.run

    def slow(
        runner: ModelRunner, segments: Sequence[Segment], on_layer: OnLayer | None = None
    ) -> list[list[Sampled]]:
        computing.set()
        released.wait(60)
        return run(runner, segments, on_layer)

    monkeypatch.setattr(ModelRunner, "run", slow)
    async with asyncio.TaskGroup() as tasks:

        async def early() -> None:
            """Before the harness sees a worker that is ready."""
            await asyncio.to_thread(computing.wait, 60)
            info = await until_state(registry_of[0], "starting")
            session = await Session(info).open()
            try:
                await session.send(RunLocal(SPEC))
                assert await session.event() == Refused("a", 0, "starting")
            finally:
                await session.close()
                released.set()

        registry_of: list[Registry] = []
        connect = Registry.connect

        async def remembered(url: str, **options: str) -> Registry:
            registry_of.append(await connect(url, **options))
            return registry_of[-1]

        monkeypatch.setattr(Registry, "connect", remembered)
        task = tasks.create_task(early())
        async with workers(tiny_model("llama"), CONFIG, "decode-0") as running:
            assert task.done(), "it was not ready before it had computed"
            decode = await running.session("decode-0")
            await decode.send(RunLocal(SPEC))
            await decode.answer()


_HANGING_WORKER = """
import asyncio, sys, threading
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.runner import ModelRunner
from kvrelay.process.stop_request import StopRequest
from kvrelay.process.telemetry import configure_logging
from kvrelay.worker.steps import step_watch
from kvrelay.worker.steps.engine_thread import EngineThread
from kvrelay.worker.runtime.process import run_in_process
from kvrelay.worker.runtime.settings import WorkerSettings
import decode_worker.main

run = ModelRunner.run

def hangs_here(runner, segments, on_layer=None):
    if len(segments[0].token_ids) == 61:
        threading.Event().wait()
    return run(runner, segments, on_layer)

async def main():
    config = ClusterConfig.model_validate_json(sys.argv[3])
    settings = WorkerSettings("decode-0", "decode", sys.argv[1], sys.argv[2], config)
    await run_in_process("decode-0", decode_worker.main.serve(settings, StopRequest()))

ModelRunner.run = hangs_here
step_watch.LEAST_S = 1.0
configure_logging()
asyncio.run(main())
"""


@pytest.mark.long
async def test_a_process_whose_engine_hangs_ends_and_shows_where(
    tiny_model: Callable[..., Path],
) -> None:
    async with EmbeddedRedis() as redis:
        arguments = (str(tiny_model("llama")), redis.url, CONFIG.model_dump_json())
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _HANGING_WORKER, *arguments, stderr=asyncio.subprocess.PIPE
        )
        try:
            async with await Registry.connect(redis.url) as registry:
                session = await Session(await until_state(registry, "ready")).open()
            await session.send(RunLocal(SPEC))
            _, stderr = await asyncio.wait_for(child.communicate(), 60)
            await session.close()
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
    assert child.returncode == process.HUNG
    *above, last = stderr.decode().splitlines()
    assert "hangs_here" in "\n".join(above), "the stack of the thread that hangs"
    assert "engine_hung" in last
    assert "a step of 61 tokens" in last


_FROZEN_LOOP = """
import asyncio, threading
from kvrelay.worker.runtime import process

async def freeze():
    await asyncio.sleep(0)
    frozen_here()

def frozen_here():
    threading.Event().wait()

process.LOOP_S = 0.5
asyncio.run(process.run_in_process("decode-0", freeze()))
"""


async def test_a_process_whose_event_loop_is_frozen_ends_and_shows_where() -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _FROZEN_LOOP, stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await asyncio.wait_for(child.communicate(), 60)
    assert child.returncode == 1
    assert "frozen_here" in stderr.decode()
