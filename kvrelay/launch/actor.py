"""The code of a Ray actor's process: one worker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import ray

from kvrelay.launch.forked_worker import ForkedWorker
from kvrelay.launch.pool_switch import Roles
from kvrelay.models import resolve_model
from kvrelay.process.telemetry import configure_logging, flush_logs, get_logger
from kvrelay.types.workers import PoolName
from kvrelay.worker.runtime.settings import WorkerSettings

_POLL_S = 1.0
_ENDS_PROCESS = "raise_sys_exit_with_custom_error_message"

log = get_logger("launch")


class WorkerActor:
    """One worker in its own process. `run` returns when the worker has ended."""

    def __init__(
        self, settings: WorkerSettings, variables: Mapping[str, str], template: str = ""
    ) -> None:
        """`variables` are added to the environment; torch reads some of them when it is imported.
        `template` is the socket of this machine's template process, or empty.
        """
        os.environ.update(variables)
        self._settings = settings
        self._variables = variables
        self._template = template
        self._forked: ForkedWorker | None = None
        # Orders that came before the forked worker was requested.
        self._orders: list[dict[str, object]] = []
        # For this process, if there is no template.
        self._roles = Roles()

    async def node(self) -> str:
        """Returns Ray's id of the node that the worker runs on."""
        return str(ray.get_runtime_context().get_node_id())

    async def run(self) -> None:
        """Serves until the worker is told to end, in a forked process if there is a template.
        Raises the error that ended the worker.
        """
        configure_logging()
        settings = on_this_node(self._settings)
        orphaned = asyncio.create_task(self._orphaned())
        try:
            with _on_sigterm(partial(asyncio.get_running_loop().call_soon_threadsafe, self._drain)):
                if not await self._served_by_fork(settings):
                    # Imported here, because a forked worker needs none of it in this process.
                    from kvrelay.worker.runtime.process import run_in_process

                    await run_in_process(settings.worker_id, self._roles.serve(settings))
            if orphaned.done():
                flush_logs()
                os._exit(0)
        finally:
            orphaned.cancel()

    async def _orphaned(self) -> None:
        """Returns when the raylet that started this process has died. After that, nothing can stop
        or replace this worker.

        Ray lets the process run as long as `run` does, so the worker drains and ends by itself.
        """
        raylet = os.getppid()
        while True:
            await asyncio.sleep(_POLL_S)
            if os.getppid() != raylet:
                log.warning("raylet_lost", worker=self._settings.worker_id)
                self._drain()
                return

    async def _served_by_fork(self, settings: WorkerSettings) -> bool:
        """Serves in a process forked from the template until that process ends. Returns False at
        once if there is no template.
        """
        if not self._template:
            return False
        try:
            self._forked = await ForkedWorker.ask(self._template, settings, self._variables)
        except OSError as error:
            log.warning("template_unavailable", worker=settings.worker_id, reason=str(error))
            return False
        for order in self._orders:
            self._forked.tell(**order)
        if not await self._forked.started():
            log.warning("template_unavailable", worker=settings.worker_id, reason="template ended")
            self._forked = None
            return False
        await self._forked.ended()
        return True

    def _tell(self, **order: object) -> None:
        """Sends an order to the forked worker. Orders that come before the fork are kept for it."""
        self._orders.append(order)
        if self._forked is not None:
            self._forked.tell(**order)

    def _drain(self) -> None:
        self._roles()
        self._tell(drain=True)

    async def drain(self) -> None:
        """Ends `run` when all requests of the worker are finished or handed back. A second call
        ends `run` at once.
        """
        self._drain()

    async def turn(self, pool: PoolName) -> None:
        """Switches the worker to that pool; `run` continues. The worker loses its current
        requests.
        """
        self._roles.turn(pool)
        self._tell(turn=pool)

    async def stop(self) -> None:
        """Ends `run` at once, even with streams in progress."""
        self._roles.now()
        self._tell(stop=True)


@contextmanager
def _on_sigterm(call: Callable[[], object]) -> Iterator[None]:
    """Registers `call` as the action for SIGTERM, in the main thread.

    Only the main thread may set a signal handler, and Ray uses the main thread: async actors are
    created and run in another thread. So this replaces the function that Ray's own handler calls to
    end the process.
    """
    module = ray._private.worker
    ends_process = getattr(module, _ENDS_PROCESS, None)
    if ends_process is None:
        log.warning("sigterm_drain_unavailable")
    setattr(module, _ENDS_PROCESS, lambda *_, **__: call())
    try:
        yield
    finally:
        setattr(module, _ENDS_PROCESS, ends_process)


def on_this_node(settings: WorkerSettings) -> WorkerSettings:
    """Returns the settings with the values that differ between hosts: the folder of the model, and
    for `worker_host: auto` the address under which other Ray nodes reach this node. Raises NotFound
    for a model that is not on this host.
    """
    settings = replace(settings, model_path=resolve_model(settings.model_path))
    listen = settings.config.listen
    if listen.worker_host != "auto":
        return settings
    host = ray.util.get_node_ip_address()
    listen = listen.model_copy(update={"worker_host": f"[{host}]" if ":" in host else host})
    return replace(settings, config=settings.config.model_copy(update={"listen": listen}))
