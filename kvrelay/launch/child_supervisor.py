"""Keeps a process of a cluster running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from autoscaler.backoff import FIRST_DELAY_S, MAX_DELAY_S, WINDOW_S, Deaths
from kvrelay.errors import ConfigError, KvRelayError
from kvrelay.launch.child_command import ChildCommand
from kvrelay.process.telemetry import get_logger

# Within the window that `Deaths` keeps. One more death ends the cluster.
_MOST_DEATHS = 5

log = get_logger("cluster")


class ChildSupervisor:
    """Restarts the controller or a router when it ends by itself.

    The workers end with the controller. Until there are new workers, requests wait at the router.
    Streams then continue where they stopped. Streams end with their router; clients resume them at
    the next one.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[ChildCommand]],
        stop_timeout_s: float,
        *,
        is_configured: bool = False,
        number: int | None = None,
    ) -> None:
        """
        - name: of the process, in the log.
        - stop_timeout_s: for the process to end when it is asked to.
        - is_configured: the process has run with this configuration, so that a ConfigError has a
          cause that may pass, such as a port that is in use.
        - number: of the process among several of a router, in the log.
        """
        self._name = name
        self._start = start
        self._stop_timeout_s = stop_timeout_s
        self._is_configured = is_configured
        self._log = log if number is None else log.bind(router_process=number)
        self._child: ChildCommand | None = None
        # Unexpected ends so far.
        self.deaths = 0
        # Ends with the error when restarts do not help.
        self._supervising: asyncio.Task[KvRelayError] | None = None

    @property
    def child(self) -> ChildCommand:
        """The current process."""
        assert self._child is not None, "not started"
        return self._child

    async def start(self) -> None:
        """Starts the first process, without restarts until `supervise`."""
        self._child = await self._start()

    def supervise(self) -> None:
        """Restarts the process from now on."""
        self._supervising = asyncio.create_task(self._supervise())

    async def _supervise(self) -> KvRelayError:
        deaths = Deaths()
        while True:
            error = await self.child.end()
            deaths = deaths.and_at(time.monotonic())
            if isinstance(error, ConfigError) and not self._is_configured:
                return error
            if len(deaths.times) > _MOST_DEATHS:
                tries = f"{_MOST_DEATHS} times in {WINDOW_S:g} s"
                error.message += f"; it was started again {tries}, and kept ending"
                error.args = (error.message,)
                return error
            self.deaths += 1
            self._log.error(
                f"{self._name}_restarting", reason=error.message, deaths=len(deaths.times)
            )
            await asyncio.sleep(max(0.0, deaths.replace_at - time.monotonic()))
            self._child = await self._restart()

    async def _restart(self) -> ChildCommand:
        """Starts a process. Tries again for as long as the machine cannot start a process, for
        example for want of memory or process ids.
        """
        delay_s = FIRST_DELAY_S
        while True:
            try:
                return await self._start()
            except OSError as error:
                self._log.error(f"{self._name}_start_failed", reason=str(error), wait_s=delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    async def end(self) -> KvRelayError:
        """Waits until restarts do not help. Returns the error."""
        assert self._supervising is not None, "not supervised"
        return await asyncio.shield(self._supervising)

    async def stop(self) -> None:
        """Ends the supervision and the process, which drains."""
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.gather(self._supervising, return_exceptions=True)
        if self._child is not None:
            await self._child.stop(self._stop_timeout_s)

    def halt(self) -> None:
        """Asks the process, which `stop` has asked before, to end at once."""
        if self._child is not None:
            self._child.halt()

    def kill(self) -> None:
        """Kills the process and everything it has started, for good."""
        if self._supervising is not None:
            self._supervising.cancel()
        if self._child is not None:
            self._child.kill()
