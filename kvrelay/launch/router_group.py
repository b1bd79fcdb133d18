"""The processes of one router."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from kvrelay.config.listen import ENDPOINTS
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import KvRelayError
from kvrelay.launch.child_command import ChildCommand
from kvrelay.launch.child_supervisor import ChildSupervisor
from kvrelay.launch.component_starter import ComponentStarter
from kvrelay.launch.endpoints import Endpoints
from kvrelay.process.owned_folder import SHORT_PARENT, OwnedFolder
from kvrelay.process.shared_port import claim_port
from kvrelay.process.stop_request import StopRequest
from kvrelay.process.tcp_address import cannot_listen
from kvrelay.process.telemetry import get_logger

log = get_logger("cluster")

# For a router to drain.
DRAIN_TIMEOUT_S = 60.0

StartRouter = Callable[..., Awaitable[ChildCommand]]


class RouterGroup:
    """Runs `router.processes` processes at the same ports, and restarts each that ends by itself.

    Each is a router of its own to workers and controllers: it has its own queue and limits. The
    kernel chooses the process of a connection. Metrics and status of any of them include all.
    """

    def __init__(self, config: ClusterConfig, start: StartRouter) -> None:
        """`start` starts `kvrelay router` with a configuration and arguments."""
        self._config = config
        self._start = start
        # For the sockets between the processes.
        self._folder = Path()
        # The claims of the ports, and the folder.
        self._claims = ExitStack()
        self._processes = [
            ChildSupervisor(
                "router",
                self._starter(number),
                DRAIN_TIMEOUT_S,
                is_configured=True,
                number=number if config.router.processes > 1 else None,
            )
            for number in range(config.router.processes)
        ]

    def _starter(self, number: int) -> Callable[[], Awaitable[ChildCommand]]:
        async def start() -> ChildCommand:
            if self.size == 1:
                return await self._start(self._config)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            return await self._start(self._config, "--sibling", f"{self._folder}:{number}")

        return start

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self._processes)

    @property
    def children(self) -> list[ChildCommand]:
        """The current processes."""
        return [one.child for one in self._processes]

    @property
    def deaths(self) -> int:
        """How often a process has ended unexpectedly and was started again."""
        return sum(one.deaths for one in self._processes)

    async def start(self) -> None:
        """Claims the ports and starts the processes, without restarts until `supervise`. Raises
        ConfigError if an address is not available, and OSError if there is no room for a folder.
        """
        if self.size > 1:
            self._claim()
            self._folder = self._claims.enter_context(OwnedFolder("router", SHORT_PARENT)).path
        for one in self._processes:
            await one.start()

    def _claim(self) -> None:
        listen = self._config.listen
        for endpoint in ENDPOINTS:
            address = getattr(listen, endpoint)
            try:
                claim, claimed = claim_port(address)
            except OSError as error:
                raise cannot_listen(f"listen.{endpoint}", address, error) from error
            self._claims.enter_context(closing(claim))
            listen = listen.model_copy(update={endpoint: claimed})
        self._config = self._config.model_copy(update={"listen": listen})

    async def ready(self) -> Endpoints:
        """Waits until all processes serve. Raises the error of one that ends before."""
        lines = await asyncio.gather(*(one.line() for one in self.children))
        return Endpoints.parse(lines[0])

    def supervise(self, endpoints: Endpoints) -> None:
        """Restarts the processes at these endpoints from now on."""
        listen = endpoints.fixed_in(self._config.listen)
        self._config = self._config.model_copy(update={"listen": listen})
        for one in self._processes:
            one.supervise()

    async def end(self) -> KvRelayError:
        """Waits until restarts of the last process do not help. Returns its error. While others
        serve, the router does without a process that keeps ending.
        """
        ends = {
            asyncio.create_task(one.end()): number for number, one in enumerate(self._processes)
        }
        try:
            for left in reversed(range(self.size)):
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                ended = done.pop()
                number, error = ends.pop(ended), ended.result()
                if left:
                    reason = error.message
                    log.error("router_given_up", router_process=number, left=left, reason=reason)
            return error
        finally:
            for one in ends:
                one.cancel()

    async def stop(self) -> None:
        """Ends the supervision and the processes, which drain."""
        await asyncio.gather(*(one.stop() for one in self._processes))
        self._claims.close()

    def halt(self) -> None:
        """Asks the processes, which `stop` has asked before, to end at once."""
        for one in self._processes:
            one.halt()

    def kill(self) -> None:
        """Kills the processes and everything they have started, for good."""
        for one in self._processes:
            one.kill()


async def run_group(config: ClusterConfig, ready: Callable[[str], None]) -> None:
    """Runs the processes of a router until a signal, which lets them drain, or a second one, which
    ends them at once. `ready` receives the router's ready line.

    Raises ConfigError if an address is not available, and the error of a process that ends at the
    start or that restarts do not help.
    """
    stop = StopRequest()
    stop.install()
    with OwnedFolder("cluster") as folder:
        group = RouterGroup(config, partial(ComponentStarter(folder.path).start, "router"))
        running = asyncio.create_task(_serve(group, ready))
        stopping = asyncio.create_task(stop.drain.wait())
        halting = asyncio.create_task(_halt(group, stop))
        try:
            await asyncio.wait({stopping, running}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        finally:
            for task in (running, stopping):
                task.cancel()
            await group.stop()
            halting.cancel()


async def _serve(group: RouterGroup, ready: Callable[[str], None]) -> None:
    await group.start()
    endpoints = await group.ready()
    group.supervise(endpoints)
    ready(str(endpoints))
    raise await group.end()


async def _halt(group: RouterGroup, stop: StopRequest) -> None:
    await stop.halt.wait()
    group.halt()
