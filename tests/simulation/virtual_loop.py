"""An event loop in virtual time, and processes on it that can be frozen and killed."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any

_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Stuck(Exception):
    """Nothing will ever happen again, and the main task has not ended."""


class Process:
    """All that runs in its context: tasks, callbacks and their descendants, as contextvars inherit
    it.

    Frozen, what is due for it is kept and happens when it is thawed, as after SIGSTOP and SIGCONT.
    Killed, it never runs another line: no `finally`, no last message.
    """

    def __init__(self, loop: VirtualLoop, name: str, clock_offset: float = 0.0) -> None:
        self.name = name
        self.alive = True
        self.frozen_since: float | None = None
        self.slowness = 1.0  # how many times longer its threads take
        self.parked: deque[asyncio.Handle] = deque()
        self.clock_offset = clock_offset
        self._loop = loop
        self.context = contextvars.Context()
        self.context.run(_PROCESS.set, self)

    def now(self) -> float:
        """kvrelay.clock.Clock: each host's monotonic clock starts somewhere else."""
        return self._loop.time() + self.clock_offset

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._loop.create_task(work, context=self.context)

    def soon(self, delay: float, call: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        return self._loop.call_later(delay, call, *args, context=self.context)

    def freeze(self) -> None:
        if self.frozen_since is None:
            self.frozen_since = self._loop.time()

    def thaw(self) -> None:
        self.frozen_since = None
        self._loop.put_back(self.parked)

    def kill(self) -> None:
        self.alive = False


def current_process() -> Process:
    process = _PROCESS.get()
    assert process is not None, "this code runs in no process"
    return process


class _Numbered:
    """Its place in a set depends on the history alone, not on an address."""

    def __new__(cls, *args: Any, loop: VirtualLoop, **more: Any) -> Any:
        self = super().__new__(cls)
        self.number = next(loop.numbers)
        return self

    def __hash__(self) -> int:
        return self.number  # type: ignore[attr-defined, no-any-return]

    def __eq__(self, other: object) -> bool:
        return self is other


class _Task(_Numbered, asyncio.Task):  # type: ignore[type-arg]
    pass


class _Future(_Numbered, asyncio.Future):  # type: ignore[type-arg]
    pass


class VirtualLoop(asyncio.BaseEventLoop):
    """Time jumps to the next timer as soon as nothing is left to run. Work for threads runs here,
    at some moment of its seeded duration. No sockets, no threads, no wall clock: the history
    depends on `rng` alone.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.numbers = count(1)
        # All there ever were: none is lost to the garbage collector in mid-history
        self.tasks: list[_Task] = []
        self.steps = 0
        self.step_s = 0.002, 0.012  # least and most that a step of an engine takes
        self.failures: list[str] = []  # of callbacks and of tasks that nobody asks
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._now

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def _make_task(
        self, loop: object, work: Coroutine[Any, Any, Any], **more: Any
    ) -> asyncio.Task[Any]:
        task = _Task(work, loop=self, **more)
        context = more.get("context")
        task.process = _PROCESS.get() if context is None else context.get(_PROCESS)
        self.tasks.append(task)
        return task

    def _note(self, loop: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failures.append(f"{context.get('message')}: {error!r}")

    def run_in_executor(  # type: ignore[override]
        self, executor: object, call: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """A thread's work. That of a pool of its own is the engine's and takes milliseconds; others
        are copies.
        """
        process = current_process()
        future = self.create_future()
        # Most copies are short; some meet a machine that is busy.
        seconds = (
            self._rng.uniform(*self.step_s)
            if executor
            else self._rng.choice((1e-4, 1e-4, 3e-4, 1e-3, 0.03))
        )
        before = seconds * process.slowness * self._rng.random()
        after = seconds * process.slowness - before

        def work() -> None:
            try:
                result = call(*args)
            except BaseException as error:  # noqa: BLE001  whatever it is, it is the waiter's
                process.soon(after, _fail, future, error)
            else:
                process.soon(after, _finish, future, result)

        process.soon(before, work)
        return future

    def put_back(self, handles: deque[asyncio.Handle]) -> None:
        self._ready.extend(handles)
        handles.clear()

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Of those that are due at the same time the first to come is the first to run."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self.numbers), timer))
        return timer

    def _run_once(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not self._ready:
            if not timers:
                raise Stuck
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(timers)[2])
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(_PROCESS)
            if process is not None and (not process.alive or process.frozen_since is not None):
                process.parked.append(handle)
                continue
            self.steps += 1
            handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # it leaves the heap when it is due

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: object) -> None:
        raise AssertionError("there is no I/O")

    def end(self) -> None:
        """Ends what is left of all tasks, those of killed processes too, so that nothing is left to
        the collector.
        """
        self.set_exception_handler(lambda loop, context: None)
        for _ in range(50):
            left = [task for task in self.tasks if not task.done()]
            if not left:
                break
            for task in left:
                if task.process is not None:
                    task.process.alive = True
                    task.process.thaw()
                task.cancel()
            for _ in range(20):
                if self._ready or self._timers:
                    self._thread_id = None
                    self.run_briefly()
        for task in self.tasks:
            if task.done() and not task.cancelled():
                task.exception()
        self.tasks.clear()
        self._ready.clear()
        self._timers.clear()
        self.close()

    def run_briefly(self) -> None:
        self.call_soon(self.stop)
        self.run_forever()


def _finish(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
