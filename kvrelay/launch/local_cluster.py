"""A whole cluster under this process: Redis, a controller with its Ray workers, and a router, each
in a child process.

With an existing Ray cluster, the workers run on the nodes of that cluster, and Redis must exist
too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from autoscaler.backoff import Deaths
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError, KvRelayError, Unavailable
from kvrelay.launch.preflight import check_machine
from kvrelay.launch.ray_folder import remove_abandoned_folders
from kvrelay.models import resolve_model
from kvrelay.process.child import REASON_FILE, bound_to_parent, family, send_signal
from kvrelay.process.telemetry import get_logger
from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.state.registry import Registry

_READY = re.compile(r"^kvrelay ready grpc=(\S+) http=(\S+) admin=(\S+)$")
_START_TIMEOUT_S = 300.0
# For an existing Ray cluster, which may have to add nodes first.
_NODES_TIMEOUT_S = 900.0
_DRAIN_TIMEOUT_S = 60.0
# For a controller, which drains its workers.
_STOP_TIMEOUT_S = 45.0
_BAD_USAGE = 2
# Within the window that `Deaths` keeps. One more death ends the cluster.
_CONTROLLER_DEATHS = 5
# Lifetime of the registry entries of killed workers: their time to live in Redis, plus one second.
_ENTRIES_END_S = 4.0
_LOOK_S = 0.2
# Most workers that an error lists.
_SHOWN = 3
# Most log lines that an error quotes.
_LAST_WORDS = 20

log = get_logger("cluster")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of a router: HOST:PORT of gRPC and admin, URL of HTTP."""

    grpc: str
    http: str
    admin: str

    def __str__(self) -> str:
        return f"kvrelay ready grpc={self.grpc} http={self.http} admin={self.admin}"


class Child:
    """A `kvrelay` command in a child process, which ends with this process."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, reason_file: Path | None = None
    ) -> None:
        self.name = name
        self.process = process
        self._reason_file = reason_file

    @classmethod
    async def start(
        cls,
        name: str,
        *arguments: str,
        log_file: IO[bytes] | None = None,
        reason_file: Path | None = None,
    ) -> Child:
        """Starts the command. This process reads the stdout of a router. All other output goes to
        `log_file`, or else to this process's stderr.

        If the command fails, it writes the reason to `reason_file`, if given; `end` returns that
        reason in its error.
        """
        environment = {name: value for name, value in os.environ.items() if name != REASON_FILE}
        if reason_file is not None:
            environment[REASON_FILE] = str(reason_file)
        process = await asyncio.create_subprocess_exec(
            *bound_to_parent(sys.executable, "-m", "kvrelay.cli.main", name, *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if name == "router" else log_file or sys.stderr,
            stderr=log_file,
            env=environment,
            # Ctrl-C must reach only the parent, which stops its children in order.
            start_new_session=True,
        )
        return cls(name, process, reason_file)

    async def line(self) -> str:
        """Returns the next line of stdout. Raises the error of `end` if the process ends first."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise await self.end()
        return line.decode().rstrip("\n")

    async def end(self) -> KvRelayError:
        """Waits until the process has ended by itself. Returns the corresponding error."""
        code = await self.process.wait()
        reason = self._reason()
        if code == _BAD_USAGE:
            return ConfigError(
                reason
                or f"the {self.name} rejected the model or the configuration; the reason is "
                "in the log above"
            )
        return Unavailable(
            reason or f"the {self.name} ended with exit code {code}; its log is above"
        )

    def _reason(self) -> str:
        """Returns the reason that the process wrote; empty if it wrote none."""
        try:
            return "" if self._reason_file is None else self._reason_file.read_text()
        except OSError:
            return ""

    async def stop(self, timeout_s: float) -> int:
        """Asks the process to end, and kills it after `timeout_s`. Returns its exit code."""
        if self.process.returncode is None:
            send_signal(self.process, signal.SIGTERM)
            try:
                async with asyncio.timeout(timeout_s):
                    await self.process.wait()
            except TimeoutError:
                log.warning("process_killed", process=self.name, after_seconds=timeout_s)
                self.kill()
        return await self.process.wait()

    def kill(self) -> None:
        """Kills the process and everything it has started. Some of Ray's processes would otherwise
        live for another minute.
        """
        if self.process.returncode is None:
            for pid in family(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class LocalCluster:
    """Async context manager. After entry, the whole cluster serves. On exit, the cluster drains and
    ends.

    `quiet` keeps the logs of the components off this process's stderr. Raises Unavailable when a
    component does not start, and ConfigError for a missing model or a model that the workers
    refuse.
    """

    def __init__(
        self, config: ClusterConfig, *, quiet: bool = False, ray_address: str | None = None
    ) -> None:
        self._config = config
        self._ray_address = ray_address
        self._quiet = quiet
        # No other process uses the Redis of this cluster.
        self._sole = False
        self._log_file: IO[bytes] | None = None
        self._exits = AsyncExitStack()
        self._folder = Path()
        self._routers: list[Child] = []
        self._numbers = itertools.count()
        self._controller: Child | None = None
        self._controllers_end: asyncio.Task[KvRelayError] | None = None

    async def __aenter__(self) -> LocalCluster:
        # Checked before any process is started.
        await asyncio.to_thread(check_machine, self._config, is_local=self._ray_address is None)
        model = resolve_model(self._config.model.path)
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="kvrelay-"))
            self._exits.callback(shutil.rmtree, self._folder)
            if self._quiet:
                # The stack closes the file.
                self._log_file = self._exits.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            url = self._config.redis.url
            self._sole = url == "embedded"
            if self._sole:
                redis = await self._exits.enter_async_context(EmbeddedRedis())
                url = redis.url
            update: dict[str, object] = {
                "redis": self._config.redis.model_copy(update={"url": url})
            }
            # On an existing Ray cluster, each host finds the model itself.
            if self._ray_address is None:
                update["model"] = self._config.model.model_copy(update={"path": model})
            self._config = self._config.model_copy(update=update)
            await self._begin()
            self._exits.push_async_callback(self._stop_controller)
            self._controller = await self._start_controller()
            self.endpoints = await self.add_router(self._config)
            self._controllers_end = asyncio.create_task(self._keep_controller())
        except BaseException as error:
            if isinstance(error, KvRelayError) and (words := self._last_words()):
                error.add_note(words)
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._exits.aclose()

    @property
    def config(self) -> ClusterConfig:
        """The configuration in effect, with the resolved model and Redis URL."""
        return self._config

    async def add_router(self, config: ClusterConfig) -> Endpoints:
        """Starts another router for the same workers. Returns its endpoints once it serves.
        `config` must derive from `self.config`.
        """
        router = await Child.start(
            "router",
            "--config",
            self._write(config),
            log_file=self._log_file,
            reason_file=self._new_reason_file(),
        )
        self._routers.append(router)
        self._exits.push_async_callback(router.stop, _DRAIN_TIMEOUT_S)
        return await self._ready(router)

    async def wait(self) -> None:
        """Waits until a component has ended for good. Raises the corresponding error."""
        assert self._controllers_end is not None, "not started"
        ends = [asyncio.create_task(child.end()) for child in self._routers]
        try:
            done, _ = await asyncio.wait(
                {self._controllers_end, *ends}, return_when=asyncio.FIRST_COMPLETED
            )
            raise done.pop().result()
        finally:
            for end in ends:
                end.cancel()

    async def _start_controller(self) -> Child:
        ray_address = () if self._ray_address is None else ("--ray-address", self._ray_address)
        sole = ("--sole",) if self._sole else ()
        config = self._write(self._config)
        reason_file = self._new_reason_file()
        return await Child.start(
            "controller",
            "--config",
            config,
            *ray_address,
            *sole,
            log_file=self._log_file,
            reason_file=reason_file,
        )

    async def _keep_controller(self) -> KvRelayError:
        """Restarts the controller when it ends by itself. Returns the error when restarts do not
        help.

        The workers end with the controller. Until there are new workers, requests wait at the
        router. Streams then continue where they stopped.
        """
        assert self._controller is not None
        deaths = Deaths()
        while True:
            error = await self._controller.end()
            deaths = deaths.and_at(time.monotonic())
            if isinstance(error, ConfigError) or len(deaths.times) > _CONTROLLER_DEATHS:
                return error
            log.error("controller_restarting", reason=error.message, deaths=len(deaths.times))
            await asyncio.sleep(max(0.0, deaths.replace_at - time.monotonic()))
            self._controller = await self._start_controller()

    async def _stop_controller(self) -> None:
        if self._controllers_end is not None:
            self._controllers_end.cancel()
            await asyncio.gather(self._controllers_end, return_exceptions=True)
        if self._controller is not None:
            await self._controller.stop(_STOP_TIMEOUT_S)
        remove_abandoned_folders()

    def kill(self) -> None:
        """Kills all processes at once, even with streams in progress."""
        for child in (*self._routers, self._controller):
            if child is not None:
                child.kill()

    async def _ready(self, router: Child) -> Endpoints:
        """Waits for the router's ready line or for the end of the controller, whichever comes
        first.
        """
        assert self._controller is not None
        line = asyncio.create_task(router.line())
        failed = asyncio.create_task(self._controller.end())
        timeout_s = _START_TIMEOUT_S if self._ray_address is None else _NODES_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait({line, failed}, return_when=asyncio.FIRST_COMPLETED)
            if not line.done():
                raise failed.result()
        except TimeoutError:
            reasons = await self._pending()
            raise Unavailable(
                f"the workers were not ready within {timeout_s:g} s{reasons}"
            ) from None
        finally:
            failed.cancel()
            line.cancel()
        match = _READY.match(line.result())
        if match is None:
            raise KvRelayError(f"the router printed {line.result()!r} instead of its addresses")
        return Endpoints(*match.groups())

    async def _begin(self) -> None:
        """Overwrites the desired pool sizes that an earlier cluster left on this Redis.

        Raises Unavailable if Redis does not answer, and ConfigError if the earlier cluster still
        runs.
        """
        try:
            connected = await Registry.connect(self._config.redis.url)
        except Unavailable as error:
            reason = error.message.rstrip(". ")
            raise Unavailable(
                f"redis.url: {reason}; start a Redis there, or set redis.url: embedded"
            ) from None
        async with connected as registry:
            await self._check_alone(registry)
            await registry.set_desired(
                {"prefill": self._config.prefill.replicas, "decode": self._config.decode.replicas}
            )

    async def _check_alone(self, registry: Registry) -> None:
        """Raises ConfigError if another cluster runs on this Redis. The registry entries of killed
        workers expire; the entries of another cluster are renewed.
        """

        async def others() -> str:
            infos = [info for info in await registry.workers() if info.state != "draining"]
            return ", ".join(f"{info.worker_id} at {info.address}" for info in infos[:_SHOWN])

        gives_up_at = time.monotonic() + _ENTRIES_END_S
        while found := await others():
            if time.monotonic() > gives_up_at:
                raise ConfigError(
                    f"redis.url: another cluster runs on this Redis ({found}); stop that "
                    "cluster, or give this one a separate database, for example "
                    "redis://HOST:PORT/1"
                )
            await asyncio.sleep(_LOOK_S)

    async def _pending(self) -> str:
        """Returns the workers that wait for room, with the reasons; empty if there are none."""
        async with await Registry.connect(self._config.redis.url) as registry:
            return "".join(
                f"; {one.worker_id} waits for room: {one.reason}"
                for one in await registry.pending()
            )

    def _last_words(self) -> str:
        """Returns the end of the components' logs, if `quiet` hid them from the user."""
        if self._log_file is None:
            return ""
        self._log_file.seek(0)
        return "\n".join(self._log_file.read().decode(errors="replace").splitlines()[-_LAST_WORDS:])

    def _new_reason_file(self) -> Path:
        return self._folder / f"{next(self._numbers)}.reason"

    def _write(self, config: ClusterConfig) -> str:
        """Writes the configuration to a file for a child process. JSON is valid YAML."""
        path = self._folder / f"{next(self._numbers)}.yaml"
        path.write_text(json.dumps(config.model_dump(mode="json"), indent=1))
        return str(path)
