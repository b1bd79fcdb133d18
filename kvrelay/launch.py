"""Workers as Ray actors. The only module that knows Ray, which places, starts, watches and stops workers
and carries no request.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType

import ray
from ray.actor import ActorHandle

from kvrelay.child import family
from kvrelay.config import ClusterConfig
from kvrelay.errors import ConfigError, InvalidArgument, Unavailable
from kvrelay.ray_folder import RayFolder
from kvrelay.stop_request import DRAIN_GRACE_S, StopRequest
from kvrelay.telemetry import configure_logging, flush_logs, get_logger
from kvrelay.types import PoolName
from kvrelay.worker.process import run_in_process
from kvrelay.worker.settings import WorkerSettings

_STOP_TIMEOUT_S = 5.0
_LOOK_S = 1.0
_ENDS_PROCESS = "raise_sys_exit_with_custom_error_message"
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum; KV never goes through it

log = get_logger("launch")


class WorkerActor:
    """One worker in a process of its own. `run` lasts as long as the worker does."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._stop = StopRequest()

    async def run(self) -> None:
        configure_logging()
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads without work sleep; read when torch is imported
        settings = _on_this_node(self._settings)
        orphaned = asyncio.create_task(self._orphaned())
        with _on_sigterm(partial(asyncio.get_running_loop().call_soon_threadsafe, self._stop)):
            await run_in_process(settings.worker_id, _serve(settings, self._stop))
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
                self._stop()
                return

    async def drain(self) -> None:
        """Ends `run` when all that the worker holds is finished or handed back; called twice, at once."""
        self._stop()

    async def stop(self) -> None:
        """Ends `run`, streams or not."""
        self._stop.now()


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


def _on_this_node(settings: WorkerSettings) -> WorkerSettings:
    """The settings with `worker_host: auto` resolved to the address under which other Ray nodes reach this one."""
    listen = settings.config.listen
    if listen.worker_host != "auto":
        return settings
    host = ray.util.get_node_ip_address()
    listen = listen.model_copy(update={"worker_host": f"[{host}]" if ":" in host else host})
    return replace(settings, config=settings.config.model_copy(update={"listen": listen}))


def _serve(settings: WorkerSettings, stop: StopRequest) -> Coroutine[None, None, None]:
    if settings.pool == "prefill":
        import prefill_worker.main

        return prefill_worker.main.serve(settings, stop)
    import decode_worker.main

    return decode_worker.main.serve(settings, stop)


def require_gpus(config: ClusterConfig, found: float) -> None:
    """Raises ConfigError if the workers to start with would wait for GPUs that never come."""
    prefill, decode = config.prefill, config.decode
    needed = {
        "prefill": prefill.replicas * prefill.resources.num_gpus,
        "decode": decode.replicas * decode.resources.num_gpus,
    }
    if sum(needed.values()) > found:
        each = ", ".join(f"{name} {amount:g}" for name, amount in needed.items())
        raise ConfigError(
            f"resources.num_gpus: the workers need {sum(needed.values()):g} GPUs ({each}), and Ray finds {found:g} on "
            "this machine; set it lower, for instance 0.5 to share one, or 0 for the CPU"
        )


@dataclass(frozen=True, slots=True)
class _Running:
    pool: PoolName
    actor: ActorHandle
    ended: asyncio.Task[None]


class RayLauncher:
    """Starts and stops worker actors; satisfies `autoscaler.actuator.Launcher`. Use as a context manager."""

    def __init__(
        self, settings: WorkerSettings, *, ray_address: str | None = None, num_cpus: float | None = None
    ) -> None:
        """`settings` is what every worker gets, but for its id and pool. Without an address a local Ray is started
        which offers `num_cpus` logical CPUs.
        """
        self._settings = settings
        self._address = ray_address
        self._num_cpus = num_cpus
        self._folder = RayFolder()
        self._running: dict[str, _Running] = {}
        self._refused: asyncio.Future[None] | None = None
        self._raylet: int | None = None  # of a local Ray

    def __enter__(self) -> RayLauncher:
        for name, value in _QUIET_RAY.items():
            os.environ.setdefault(name, value)
        local: dict[str, object] = {}
        if self._address is None:
            self._folder.__enter__()
            local = {
                "num_cpus": self._num_cpus,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "include_dashboard": False,
                "_temp_dir": self._folder.path,
            }
        try:
            ray.init(address=self._address or "local", logging_level="error", namespace="kvrelay", **local)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise Unavailable(f"Ray did not start: {error}") from error
        if self._address is None:  # a larger cluster may yet grow
            self._raylet = next(one for one in family(os.getpid()) if _command(one) == "raylet")
            try:
                require_gpus(self._settings.config, ray.cluster_resources().get("GPU", 0))
            except ConfigError:
                self.__exit__(None, None, None)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ray.shutdown()
        if self._address is None:
            self._folder.__exit__(None, None, None)

    def alive(self) -> Mapping[str, PoolName]:
        """Workers whose actor was asked for and has not ended; pending ones too."""
        return {worker_id: one.pool for worker_id, one in self._running.items()}

    async def start(self, pool: PoolName, worker_id: str) -> None:
        """Asks Ray for a worker, which is pending while Ray has no room. Once it serves, it is in the registry."""
        section = self._settings.config.prefill if pool == "prefill" else self._settings.config.decode
        actor = (
            ray.remote(WorkerActor)
            .options(
                num_cpus=section.resources.num_cpus,
                num_gpus=section.resources.num_gpus,
                resources=section.resources.custom,
                max_restarts=0,  # the actuator replaces the dead, under a new epoch
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(section.threads), "OMP_WAIT_POLICY": "PASSIVE"}},
            )
            .remote(replace(self._settings, pool=pool, worker_id=worker_id))
        )
        ended = asyncio.create_task(self._watch(worker_id, actor))
        self._running[worker_id] = _Running(pool, actor, ended)

    async def drain(self, worker_id: str) -> None:
        """Lets a worker finish within DRAIN_GRACE_S, then stops it."""
        running = self._running.get(worker_id)
        if running is not None:
            running.actor.drain.remote()
            await asyncio.wait({running.ended}, timeout=DRAIN_GRACE_S + _STOP_TIMEOUT_S)
            await self.stop(worker_id)

    async def stop(self, worker_id: str) -> None:
        """Stops a worker now; kills it if it does not end in time."""
        running = self._running.get(worker_id)
        if running is None:
            return
        running.actor.stop.remote()
        await asyncio.wait({running.ended}, timeout=_STOP_TIMEOUT_S)
        ray.kill(running.actor)
        await running.ended

    async def stop_all(self) -> None:
        await asyncio.gather(*(self.stop(worker_id) for worker_id in list(self._running)))

    async def refused(self) -> None:
        """Waits until a worker ends because its model or configuration cannot be served, and raises why."""
        self._refused = asyncio.get_running_loop().create_future()
        await self._refused

    @property
    def is_lost(self) -> bool:
        """A local Ray's raylet has ended: no worker can be started or stopped any more, and they end by themselves."""
        return self._raylet is not None and _command(self._raylet) != "raylet"

    async def lost(self) -> None:
        """Waits until it is so, and raises that."""
        while True:
            if self.is_lost:
                raise Unavailable("Ray's raylet ended")
            await asyncio.sleep(_LOOK_S)

    async def _watch(self, worker_id: str, actor: ActorHandle) -> None:
        try:
            await asyncio.wrap_future(actor.run.remote().future())
            log.info("worker ended", worker=worker_id)
        except ray.exceptions.RayTaskError as error:
            log.error("worker failed", worker=worker_id, error=str(error.cause))
            if isinstance(error.cause, InvalidArgument) and self._refused is not None and not self._refused.done():
                self._refused.set_exception(error.cause)
        except ray.exceptions.RayError as error:
            log.warning("worker died", worker=worker_id, error=str(error).splitlines()[0])
        finally:
            del self._running[worker_id]


def _command(pid: int) -> str:
    """Of a process that runs; nothing, if it does not."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    except FileNotFoundError:
        return ""
    return "" if rest.split()[0] == "Z" else name


def local_cpus(config: ClusterConfig, most_workers: Mapping[PoolName, int]) -> float:
    """Logical CPUs for a local Ray, so that it holds the largest pools that the configuration allows.

    On one machine workers share cores: there is nothing to wait for when there are fewer cores than workers.
    """
    wanted = (
        most_workers["prefill"] * config.prefill.resources.num_cpus
        + most_workers["decode"] * config.decode.resources.num_cpus
    )
    return max(float(os.cpu_count() or 1), wanted)


_QUIET_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
