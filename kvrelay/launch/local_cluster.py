"""A whole cluster under this process: Redis, a controller with its Ray workers, and a router, each
in a child process.

With an existing Ray cluster, the workers run on the nodes of that cluster, and Redis must exist
too.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import KvRelayError, Unavailable
from kvrelay.launch.checks.preflight import check_machine
from kvrelay.launch.checks.redis_claim import claim_redis, connected, pending_workers
from kvrelay.launch.child_command import ChildCommand
from kvrelay.launch.child_supervisor import ChildSupervisor
from kvrelay.launch.component_starter import ComponentStarter
from kvrelay.launch.endpoints import Endpoints
from kvrelay.launch.model_download import ModelDownload
from kvrelay.launch.router_group import RouterGroup
from kvrelay.models import is_on_hub, resolve_model
from kvrelay.process.owned_folder import SHORT_PARENT, OwnedFolder, remove_abandoned_folders
from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.state.registry import Registry
from kvrelay.types.workers import EndedWorker

_START_TIMEOUT_S = 300.0
# For an existing Ray cluster, which may have to add nodes first.
_NODES_TIMEOUT_S = 900.0
# For workers on vLLM, which may compile for minutes.
_VLLM_TIMEOUT_S = 1800.0
# For a controller, which drains its workers.
_STOP_TIMEOUT_S = 45.0
# Most log lines that an error quotes.
_LAST_WORDS = 20


class LocalCluster:
    """Async context manager. After entry, the whole cluster serves. On exit, the cluster drains and
    ends.

    `quiet` keeps the logs of the components off this process's stderr; `log_path` is the file for
    them instead. Raises Unavailable when a component does not start, and ConfigError for a missing
    model or a model that the workers refuse.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        quiet: bool = False,
        log_path: Path | None = None,
        ray_address: str | None = None,
    ) -> None:
        self._config = config
        self._ray_address = ray_address
        self._quiet = quiet
        self._log_path = log_path
        # No other process uses the Redis of this cluster.
        self._sole = config.redis.url == "embedded"
        self._exits = AsyncExitStack()
        # Holds the log of the components, if this process does not show it.
        self._log: IO[bytes] | None = None
        self._components = ComponentStarter(Path())
        self._routers: list[RouterGroup] = []
        self._controller = ChildSupervisor("controller", self._start_controller, _STOP_TIMEOUT_S)
        # The download of a hub model, from its start.
        self.download: ModelDownload | None = None

    async def __aenter__(self) -> LocalCluster:
        is_local = self._ray_address is None
        # Checked before any process is started.
        await asyncio.to_thread(check_machine, self._config, is_local=is_local)
        models = [resolve_model(one.model.path) for one in self._config.served]
        if is_local and (on_hub := list(filter(is_on_hub, dict.fromkeys(models)))):
            await self._download(on_hub)
        try:
            await self._start(models)
        except BaseException as error:
            if isinstance(error, KvRelayError) and (words := self._last_words()):
                error.add_note(words)
            await self._exits.aclose()
            raise
        return self

    async def _download(self, models: Sequence[str]) -> None:
        """Downloads hub models, which the processes of the cluster then find in the cache. On an
        existing Ray cluster, each host downloads them itself.
        """
        for model in models:
            async with ModelDownload(model, self._log_path) as self.download:
                await self.download.complete()
        # Their weights are known now.
        await asyncio.to_thread(check_machine, self._config, is_local=True)

    async def _start(self, models: Sequence[str]) -> None:
        folder = self._exits.enter_context(OwnedFolder("cluster")).path
        # The stack closes the file.
        if self._log_path is not None:
            self._log = self._exits.enter_context(self._log_path.open("w+b"))
        elif self._quiet:
            self._log = self._exits.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._components = ComponentStarter(folder, self._log)
        await self._resolve_config(models)
        for one in self._config.served:
            await claim_redis(one)
        # Ray's folder stays when the controller is killed.
        self._exits.callback(remove_abandoned_folders, SHORT_PARENT)
        self._exits.push_async_callback(self._controller.stop)
        await self._controller.start()
        self.endpoints = await self.add_router(self._config)
        self._controller.supervise()

    async def _resolve_config(self, models: Sequence[str]) -> None:
        """Puts the folders of the models and the URL of an embedded Redis into the
        configuration.
        """
        update: dict[str, object] = {}
        if self._sole:
            redis = await self._exits.enter_async_context(EmbeddedRedis())
            update["redis"] = self._config.redis.model_copy(update={"url": redis.url})
        # On an existing Ray cluster, each host finds the models itself.
        if self._ray_address is None:
            update |= self._config.with_paths(models)
        self._config = self._config.model_copy(update=update)

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

    @property
    def controller_deaths(self) -> int:
        """How often the controller has ended unexpectedly and was started again."""
        return self._controller.deaths

    @property
    def router_deaths(self) -> int:
        """How often a router has ended unexpectedly and was started again."""
        return sum(one.deaths for one in self._routers)

    async def worker_states(self) -> dict[str, str] | None:
        """Returns the state of each worker, as it has told Redis. None while Redis does not
        answer, and before it runs.
        """
        if self._config.redis.url == "embedded":
            return None
        states: dict[str, str] = {}
        try:
            async for registry in self._registries():
                states |= {one.worker_id: "waits for room" for one in await registry.pending()}
                states |= {one.worker_id: one.state for one in await registry.workers()}
        except Unavailable:
            return None
        return states

    async def ended_workers(self) -> dict[str, EndedWorker]:
        """Returns the workers that have ended in the last minute; empty without Redis."""
        ended: dict[str, EndedWorker] = {}
        with suppress(Unavailable):
            async for registry in self._registries():
                ended |= {one.worker_id: one for one in await registry.ended()}
        return ended

    async def _registries(self) -> AsyncIterator[Registry]:
        """Yields the registry of each model; nothing before Redis runs. Raises Unavailable."""
        if self._config.redis.url == "embedded":
            return
        for one in self._config.served:
            async with await connected(one) as registry:
                yield registry

    async def add_router(self, config: ClusterConfig) -> Endpoints:
        """Starts another router for the same workers. Returns its endpoints once it serves. From
        then on it is restarted at the same endpoints when it ends by itself. `config` must derive
        from `self.config`.
        """
        router = RouterGroup(config, partial(self._start_child, "router"))
        self._routers.append(router)
        self._exits.push_async_callback(router.stop)
        await router.start()
        endpoints = await self._ready(router)
        router.supervise(endpoints)
        return endpoints

    async def wait(self) -> None:
        """Waits until a component has ended for good. Raises the corresponding error."""
        ends = [asyncio.create_task(router.end()) for router in self._routers]
        ends.append(asyncio.create_task(self._controller.end()))
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            raise done.pop().result()
        finally:
            for end in ends:
                end.cancel()

    async def _start_controller(self) -> ChildCommand:
        ray_address = () if self._ray_address is None else ("--ray-address", self._ray_address)
        sole = ("--sole",) if self._sole else ()
        first = () if self._controller.deaths else ("--first",)
        return await self._start_child("controller", self._config, *ray_address, *sole, *first)

    async def _start_child(self, name: str, config: ClusterConfig, *arguments: str) -> ChildCommand:
        # All processes then have the same revision, and need no network.
        variables = {"HF_HUB_OFFLINE": "1"} if self.download is not None else None
        return await self._components.start(name, config, *arguments, variables=variables)

    def halt(self) -> None:
        """Ends a drain: running streams end with an error, and the workers are killed."""
        for router in self._routers:
            router.halt()
        self._controller.kill()

    def kill(self) -> None:
        """Kills all processes at once, even with streams in progress."""
        for router in self._routers:
            router.kill()
        self._controller.kill()

    def _start_timeout_s(self) -> float:
        if any(one.decode.engine == "vllm" for one in self._config.served):
            return _VLLM_TIMEOUT_S
        return _START_TIMEOUT_S if self._ray_address is None else _NODES_TIMEOUT_S

    async def _ready(self, router: RouterGroup) -> Endpoints:
        """Waits until the router serves or the controller has ended, whichever comes first."""
        ready = asyncio.create_task(router.ready())
        failed = asyncio.create_task(self._controller.child.end())
        timeout_s = self._start_timeout_s()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait({ready, failed}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise failed.result()
        except TimeoutError:
            reasons = await pending_workers(self._config)
            raise Unavailable(
                f"the workers were not ready within {timeout_s:g} s{reasons}"
            ) from None
        finally:
            failed.cancel()
            ready.cancel()
        return ready.result()

    def _last_words(self) -> str:
        """Returns the end of the components' logs, if `quiet` hid them from the user."""
        if self._log is None:
            return ""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-_LAST_WORDS:])
