"""What runs in a Ray actor's process: one worker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import ray

from kvrelay.models import resolve_model
from kvrelay.roles import Roles
from kvrelay.telemetry import configure_logging, flush_logs, get_logger
from kvrelay.types import PoolName
from kvrelay.worker.process import run_in_process
from kvrelay.worker.settings import WorkerSettings

_LOOK_S = 1.0
_ENDS_PROCESS = "raise_sys_exit_with_custom_error_message"

log = get_logger("launch")


class WorkerActor:
    """One worker in a process of its own. `run` lasts as long as the worker does."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._roles = Roles()

    async def node(self) -> str:
        """Ray's id of the node that the worker is on."""
        return str(ray.get_runtime_context().get_node_id())

    async def run(self) -> None:
        configure_logging()
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads without work sleep; read when torch is imported
        settings = on_this_node(self._settings)
        orphaned = asyncio.create_task(self._orphaned())
        with _on_sigterm(partial(asyncio.get_running_loop().call_soon_threadsafe, self._roles)):
            await run_in_process(settings.worker_id, self._roles.serve(settings))
        if orphaned.done():
            flush_logs()
            os._exit(0)
        orphaned.cancel()

    async def _orphaned(self) -> None:
        """Until the raylet that started this process has died, and nobody can stop or replace this worker any more.

        Ray lets it run on for as long as `run` does, so it drains and ends by itself.
        """
        raylet = os.getppid()
        while True:
            await asyncio.sleep(_LOOK_S)
            if os.getppid() != raylet:
                log.warning("the raylet is gone; the worker drains", worker=self._settings.worker_id)
                self._roles()
                return

    async def drain(self) -> None:
        """Ends `run` when all that the worker holds is finished or handed back; called twice, at once."""
        self._roles()

    async def turn(self, pool: PoolName) -> None:
        """`run` goes on in that pool; what the worker holds is lost."""
        self._roles.turn(pool)

    async def stop(self) -> None:
        """Ends `run`, streams or not."""
        self._roles.now()


@contextmanager
def _on_sigterm(call: Callable[[], object]) -> Iterator[None]:
    """Has SIGTERM call this, in the main thread.

    Only the main thread may set a handler, and that is Ray's: async actors are made and run in another one. So it is
    what Ray's own handler calls to end the process that is replaced.
    """
    module = ray._private.worker
    ends_process = getattr(module, _ENDS_PROCESS, None)
    if ends_process is None:
        log.warning("SIGTERM does not drain this worker: this version of Ray handles it in another way")
    setattr(module, _ENDS_PROCESS, lambda *_, **__: call())
    try:
        yield
    finally:
        setattr(module, _ENDS_PROCESS, ends_process)


def on_this_node(settings: WorkerSettings) -> WorkerSettings:
    """The settings with what differs from host to host: where the model lies, and, for `worker_host: auto`, the address
    under which other Ray nodes reach this one. Raises NotFound for a model that is not on this host.
    """
    settings = replace(settings, model_path=resolve_model(settings.model_path))
    listen = settings.config.listen
    if listen.worker_host != "auto":
        return settings
    host = ray.util.get_node_ip_address()
    listen = listen.model_copy(update={"worker_host": f"[{host}]" if ":" in host else host})
    return replace(settings, config=settings.config.model_copy(update={"listen": listen}))
