"""The thread that an engine's steps run in, and the watch over them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvrelay.clock import Clock
from kvrelay.engine.parallel.rank_lost import RankLost
from kvrelay.worker.steps.busy_share import BusyTime
from kvrelay.worker.steps.measured_step_cost import StepCost
from kvrelay.worker.steps.step_watch import POLL_S, StepHung, StepWatch

Result = TypeVar("Result")


class StepThread(ABC):
    """Runs the steps of one engine in a thread of their own, so that the event loop stays free."""

    def __init__(self, lost: Callable[[], str], clock: Clock) -> None:
        """lost: returns the reason why the engine can run no more steps; empty while it can."""
        self._lost = lost
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self.watch = StepWatch()
        self.busy = BusyTime(clock.now())
        self.cost = StepCost(clock.now())
        # True once real steps have run.
        self.proven = False
        self.hung = False

    @abstractmethod
    async def warm_up(self) -> None:
        """Runs the warm-up steps before user requests, and sets `proven`."""

    async def call(self, function: Callable[[], Result]) -> Result:
        """Calls a function in the thread, for example to bind it to a core."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def timed(
        self, tokens: int, step: Callable[[], Result], *, costed: bool = True
    ) -> Result:
        """Runs a step of about `tokens` tokens under the watch. Raises what the step raises.

        costed: whether the time tells the cost of steps, which that of a smaller model does not.
        """
        began = self._clock.now()
        self.watch.began(tokens, began)
        self.busy.began(began)
        try:
            return await self.call(step)
        except RankLost:
            # `hang` reports the lost rank, and this task is cancelled.
            await asyncio.Event().wait()
            raise
        finally:
            now = self._clock.now()
            self.watch.ended(now)
            self.busy.ended(now)
            if self.proven and costed:
                # The warm-up steps compile kernels.
                self.cost.ended(tokens, now - began, now)

    async def hang(self) -> None:
        """Waits until a step hangs or the engine loses a rank. Always raises: StepHung or
        RankLost.
        """
        while True:
            await asyncio.sleep(POLL_S)
            if reason := self._lost():
                self.hung = True
                raise RankLost(reason)
            if self.watch.poll(self._clock.now()):
                break
        self.hung = True
        raise StepHung(
            f"a step of {self.watch.tokens} tokens has run for {self.watch.age_s:.1f} s; steps "
            f"of that size end within {self.watch.bound_s:.1f} s"
        )

    def shutdown(self) -> None:
        """Ends the thread, after its running step. A hung thread is left behind."""
        self._thread.shutdown(wait=not self.hung)
