"""A whole cluster of this process: Redis, a controller with its Ray workers, and a router, each a
child process.

On a Ray that runs already, workers are on its nodes, and Redis is one that runs already, too.
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
_NODES_TIMEOUT_S = 900.0  # on a Ray cluster, which may have to add nodes first
_DRAIN_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 45.0  # of a controller, which drains its workers
_BAD_USAGE = 2
_CONTROLLER_DEATHS = 5  # within the time that `Deaths` remembers; one more, and the cluster ends
_ENTRIES_END_S = 4.0  # of a worker that was killed: its time to live in Redis, and one more second
_LOOK_S = 0.2
_SHOWN = 3  # workers in an error
_LAST_WORDS = 20  # lines of the log that go with an error

log = get_logger("cluster")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a router listens: HOST:PORT of gRPC and admin, URL of HTTP."""

    grpc: str
    http: str
    admin: str

    def __str__(self) -> str:
        return f"kvrelay ready grpc={self.grpc} http={self.http} admin={self.admin}"


class Child:
    """A `kvrelay` command in a process of its own, which dies with this one."""

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
        """A router's stdout is read here; all other output goes to `log_file`, or to this process's
        stderr.

        Why it failed goes into `reason_file` where there is one, and from there into the error that
        `end` returns.
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
            start_new_session=True,  # a Ctrl-C is for the parent, which stops its children in order
        )
        return cls(name, process, reason_file)

    async def line(self) -> str:
        """The next line of stdout. If the process ends first, raises what `end` returns."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise await self.end()
        return line.decode().rstrip("\n")

    async def end(self) -> KvRelayError:
        """Waits until it has ended by itself; returns the error that this is."""
        code = await self.process.wait()
        reason = self._reason()
        if code == _BAD_USAGE:
            return ConfigError(
                reason
                or f"the {self.name} refused the model or the configuration; the reason is above"
            )
        return Unavailable(
            reason or f"the {self.name} ended with exit code {code}; its log is above"
        )

    def _reason(self) -> str:
        """In its own words, or nothing."""
        try:
            return "" if self._reason_file is None else self._reason_file.read_text()
        except OSError:
            return ""

    async def stop(self, timeout_s: float) -> int:
        """Asks it to end, and ends it after `timeout_s`; returns its exit code."""
        if self.process.returncode is None:
            send_signal(self.process, signal.SIGTERM)
            try:
                async with asyncio.timeout(timeout_s):
                    await self.process.wait()
            except TimeoutError:
                log.warning("killed", process=self.name, after_seconds=timeout_s)
                self.kill()
        return await self.process.wait()

    def kill(self) -> None:
        """With all that it has started: some of Ray's processes would live on for a minute."""
        if self.process.returncode is None:
            for pid in family(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class LocalCluster:
    """Async context manager: on entry everything runs and serves, on exit it has drained and ended.

    `quiet` keeps the parts' logs off this process's stderr. Raises Unavailable when a part does not
    start, ConfigError for a model that is not there or that the workers refuse.
    """

    def __init__(
        self, config: ClusterConfig, *, quiet: bool = False, ray_address: str | None = None
    ) -> None:
        self._config = config
        self._ray_address = ray_address
        self._quiet = quiet
        self._sole = False  # nobody else has this cluster's Redis
        self._log_file: IO[bytes] | None = None
        self._exits = AsyncExitStack()
        self._folder = Path()
        self._routers: list[Child] = []
        self._numbers = itertools.count()
        self._controller: Child | None = None
        self._controllers_end: asyncio.Task[KvRelayError] | None = None

    async def __aenter__(self) -> LocalCluster:
        # Before anything is started for nothing.
        await asyncio.to_thread(check_machine, self._config, is_local=self._ray_address is None)
        model = resolve_model(self._config.model.path)
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="kvrelay-"))
            self._exits.callback(shutil.rmtree, self._folder)
            if self._quiet:
                # - the stack closes it
                self._log_file = self._exits.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            url = self._config.redis.url
            self._sole = url == "embedded"
            if self._sole:
                redis = await self._exits.enter_async_context(EmbeddedRedis())
                url = redis.url
            update: dict[str, object] = {
                "redis": self._config.redis.model_copy(update={"url": url})
            }
            if self._ray_address is None:  # elsewhere each host finds it by itself
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
        """As it runs: model and Redis resolved."""
        return self._config

    async def add_router(self, config: ClusterConfig) -> Endpoints:
        """Starts a router over the same workers; returns once it serves. `config` derives from
        `self.config`.
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
        """Until a part has ended by itself for good; raises what that is."""
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
        """Starts the controller again when it ends by itself; returns why, if that is of no use.

        Its workers end with it. Until there are others, requests wait at the router, and streams go
        on where they were.
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
        """Ends everything at once, streams or not."""
        for child in (*self._routers, self._controller):
            if child is not None:
                child.kill()

    async def _ready(self, router: Child) -> Endpoints:
        """Waits for the router's line, or for the controller's end, whichever comes first."""
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
            raise KvRelayError(
                f"the router printed {line.result()!r} where its addresses should be"
            )
        return Endpoints(*match.groups())

    async def _begin(self) -> None:
        """What an earlier cluster on this Redis wanted of its pools is over.

        Raises Unavailable, and ConfigError where that cluster still runs.
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
        """Entries of workers that were killed end by themselves; those of another cluster's come
        again.
        """

        async def others() -> str:
            infos = [info for info in await registry.workers() if info.state != "draining"]
            return ", ".join(f"{info.worker_id} at {info.address}" for info in infos[:_SHOWN])

        gives_up_at = time.monotonic() + _ENTRIES_END_S
        while found := await others():
            if time.monotonic() > gives_up_at:
                raise ConfigError(
                    f"redis.url: another cluster runs on this Redis ({found}), and two would take "
                    "each other's workers; end that one, or give this one a database of its own, "
                    "such as redis://HOST:PORT/1"
                )
            await asyncio.sleep(_LOOK_S)

    async def _pending(self) -> str:
        """What workers wait for, if it is for room."""
        async with await Registry.connect(self._config.redis.url) as registry:
            return "".join(
                f"; {one.worker_id} waits for room: {one.reason}"
                for one in await registry.pending()
            )

    def _last_words(self) -> str:
        """The end of the parts' logs, if they were kept from the user."""
        if self._log_file is None:
            return ""
        self._log_file.seek(0)
        return "\n".join(self._log_file.read().decode(errors="replace").splitlines()[-_LAST_WORDS:])

    def _new_reason_file(self) -> Path:
        return self._folder / f"{next(self._numbers)}.reason"

    def _write(self, config: ClusterConfig) -> str:
        """The configuration as a file for a child; JSON is YAML too."""
        path = self._folder / f"{next(self._numbers)}.yaml"
        path.write_text(json.dumps(config.model_dump(mode="json"), indent=1))
        return str(path)
