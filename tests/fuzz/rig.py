"""A router in this process without a socket: real endpoints, real dispatcher, and workers that the
rig plays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import grpc
from support.fake_worker import worker_info
from support.router_harness import DEMO, MemoryRegistry, cluster_config

from kvrelay.clock import MonotonicClock
from kvrelay.types.requests import SequenceSpec, TokenLogprobs
from kvrelay.types.workers import PoolName
from kvrelay.worker_messages import Command, RunLocal, SequenceTokens, TokenBatch
from router.api.http.app import build_app
from router.catalogue import Catalogue
from router.core.dispatcher import Dispatcher
from router.frontend.access import Access
from router.frontend.model_card import ModelCard
from router.frontend.rate_limits import Limits
from router.frontend.tokenization import Text
from router.frontend.waiting_room import WaitingRoom
from router.runtime.driver import Driver
from router.runtime.loop_slices import LoopSlices
from router.served_model import LoadedModel, RouterContext
from router.sibling_processes import Siblings

ANSWER_TOKENS = 5
ADDRESS = "127.0.0.1:8000"
T = TypeVar("T")


class PlayedWorker:
    """Stands where the driver has a session. Answers each local run at once while `answers`."""

    def __init__(self, driver: Driver, worker_id: str, pool: PoolName) -> None:
        self.info = worker_info(worker_id, pool, "127.0.0.1:1")
        self.refusal = ""
        self.commands: list[Command] = []
        self.answers = True
        self._driver = driver

    def send(self, command: Command) -> None:
        self.commands.append(command)
        if self.answers and isinstance(command, RunLocal):
            asyncio.get_running_loop().call_soon(self._answer, command.spec)

    def _answer(self, spec: SequenceSpec) -> None:
        count = min(spec.sampling.max_tokens - spec.num_emitted, ANSWER_TOKENS)
        given = (
            () if spec.sampling.logprobs is None else (TokenLogprobs(-0.5, ((20, -0.5),)),) * count
        )
        tokens = SequenceTokens(*spec.key, spec.num_emitted, (20,) * count, given, "length")
        self._driver.worker_said(self.info.worker_id, TokenBatch((tokens,)))


class Rig:
    """`prefill` adds a prefill worker, so that long prompts are disaggregated."""

    def __init__(self, prefill: bool) -> None:
        self._config = config = cluster_config(prefill=int(prefill))
        clock = MonotonicClock()
        self._runner = asyncio.Runner()
        self.registry = MemoryRegistry()
        self.card = ModelCard.load(DEMO, config.model)
        self.text = Text.load(DEMO)
        context = RouterContext(
            "router-0",
            clock,
            Access(None),
            Limits(),
            LoopSlices(),
            siblings=Siblings(),
            credentials=None,
            troubles=(),
        )
        loaded = LoadedModel(config, self.registry, self.card, self.text)
        self.catalogue = Catalogue(context, [loaded])
        (model,) = self.catalogue
        self.driver, self.frontend, self.metrics = model.driver, model.frontend, model.metrics
        self.clock = clock
        self.app = build_app(self.catalogue, context, WaitingRoom(clock), ADDRESS)
        self.workers = {"decode-0": PlayedWorker(self.driver, "decode-0", "decode")}
        if prefill:
            self.workers["prefill-0"] = PlayedWorker(self.driver, "prefill-0", "prefill")
        self.run(self._meet())

    def forget(self) -> None:
        """All that a router has learnt of its workers; attempts are numbered from 1 again."""
        self.driver.dispatcher = Dispatcher(self._config)
        for worker in self.workers.values():
            self.driver.dispatcher.worker_found(worker.info, 0.0)

    async def _meet(self) -> None:
        done = asyncio.create_task(asyncio.sleep(0))
        for worker in self.workers.values():
            self.driver._sessions[worker.info.worker_id] = (worker, done)  # type: ignore[assignment]
            self.driver.worker_found(worker.info)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def check_empty(self) -> None:
        """Nothing is left of any request."""
        left = self.driver.dispatcher.unfinished
        assert not left, f"{left} requests are left in the dispatcher"
        for worker in self.workers.values():
            worker.commands.clear()

    def close(self) -> None:
        self.run(self.text.close())
        self.run(self.frontend.guidance.close())
        self._runner.close()


@contextmanager
def rig(prefill: bool = False) -> Iterator[Rig]:
    made = Rig(prefill)
    try:
        yield made
    finally:
        made.close()


class Aborted(Exception):
    """What a call was aborted with."""

    def __init__(self, status: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{status.name}: {details}")
        self.status = status


class Context:
    """As much of a gRPC call's context as our services use; keeps what they write."""

    def __init__(self, time_left: float | None = None) -> None:
        self.written: list[Any] = []
        self._time_left = time_left

    def time_remaining(self) -> float | None:
        return self._time_left

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def write(self, message: Any) -> None:
        self.written.append(message)

    async def abort(
        self, status: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...] = ()
    ) -> NoReturn:
        for name, value in metadata:
            assert (name + value).isascii(), f"metadata that gRPC does not carry: {name}: {value!r}"
        raise Aborted(status, details)
