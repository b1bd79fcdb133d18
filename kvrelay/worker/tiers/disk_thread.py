"""A thread that waits for a disk, so that nobody else does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")
_Job = tuple["Future[object]", Callable[[], object]]


class DiskThread:
    """Runs calls one after the other. A caller may stop waiting; its call then runs to its end.

    A disk may hang for ever, so nothing joins the thread: it is a daemon, and the process may end
    without it.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        # Calls that have not ended.
        self.pending = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[], T]) -> T:
        """Calls the function in the thread. Raises what it raises."""
        done: Future[T] = Future()
        self.pending += 1
        loop = asyncio.get_running_loop()
        done.add_done_callback(lambda _: _tell(loop, self._ended))
        self._jobs.put((done, function))  # type: ignore[arg-type]
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Lets the thread end after its calls. Does not wait."""
        self._jobs.put(None)

    def join(self, seconds: float) -> bool:
        """Waits for the end of the thread. Returns False if it goes on."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _ended(self) -> None:
        self.pending -= 1

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            done, function = job
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(function())
            # The caller gets it.
            except BaseException as error:  # noqa: BLE001
                done.set_exception(error)
            # Otherwise the last block stays in memory until the next call.
            del job, done, function


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Runs the callback on the loop, unless the loop has ended meanwhile."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        return
