"""One base model in this router: its workers, its requests and what observes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvrelay.clock import Clock
from kvrelay.config.config_file import load_policy
from kvrelay.config.schema import ClusterConfig
from kvrelay.security.credentials import Credentials
from kvrelay.wire.cluster import ClusterStatus
from router.frontend.access import Access
from router.frontend.adapter_operations import AdapterOperations
from router.frontend.frontend import Frontend
from router.frontend.model_card import ModelCard
from router.frontend.rate_limits import Limits
from router.frontend.tokenization import Text
from router.observability.dashboard import StatusPage
from router.observability.defence_metrics import DefenceCollector
from router.observability.heartbeat import Heartbeat
from router.observability.index_metrics import IndexCollector
from router.observability.metrics import Metrics
from router.observability.observers import Observers
from router.observability.request_log import RequestLog
from router.observability.status import ClusterView
from router.observability.tenant_metrics import TenantMetrics
from router.observability.tracing import Tracing
from router.observability.traffic import RouterTraffic, Traffic
from router.observability.worker_metrics import QueueCollector, WorkerCollector
from router.runtime.driver import Driver
from router.runtime.loop_slices import LoopSlices
from router.runtime.pool_changes import follow_changes
from router.runtime.worker_directory import RouterRegistry
from router.sibling_processes import Siblings

# Time between two questions to the other processes of this router.
LEARN_S = 2.0


@dataclass(frozen=True, slots=True)
class RouterContext:
    """What the models of one router share."""

    router_id: str
    clock: Clock
    access: Access
    limits: Limits
    slices: LoopSlices
    siblings: Siblings
    # For connections to workers.
    credentials: Credentials | None
    # What an operator should mend, such as a certificate that ends. See Heartbeat.
    troubles: tuple[Callable[[], str], ...]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The files of a model, and the registry of its workers."""

    # Of this model alone.
    config: ClusterConfig
    registry: RouterRegistry
    card: ModelCard
    text: Text


class ServedModel:
    """Serves the requests for one base model and its adapters."""

    def __init__(
        self,
        loaded: LoadedModel,
        context: RouterContext,
        changed: asyncio.Event,
        *,
        is_first: bool = True,
    ) -> None:
        """
        - changed: set when the state of the driver may have changed.
        - is_first: the metrics of the whole process are among this model's.
        """
        config, card, clock = loaded.config, loaded.card, context.clock
        self.name = card.info.id
        self._starts_asleep = not config.decode.replicas
        self.card = card
        self.text = loaded.text
        self.registry = loaded.registry
        self.metrics = Metrics(self.name, of_process=is_first)
        self.tenant_metrics = TenantMetrics(
            self.name, context.access, context.limits, of_process=is_first
        )
        self._tracing = Tracing.from_environment(self.name, clock)
        observers = Observers(
            self.metrics, RequestLog(), self._tracing, context.limits, self.tenant_metrics
        )
        self.driver = Driver(
            config,
            loaded.registry,
            context.router_id,
            clock,
            observers,
            context.credentials,
            card.misfit,
            changed=changed,
            sleeps=config.autoscaling is not None and load_policy(Path(config.autoscaling)).sleeps,
        )
        for collector in (
            QueueCollector(self.name, self.driver),
            DefenceCollector(self.name, self.driver.dispatcher),
            IndexCollector(self.name, self.driver.dispatcher),
        ):
            self.metrics.registry.register(collector)
        self.metrics.cluster.register(WorkerCollector(self.name, self.driver, self.metrics))
        self.frontend = Frontend(
            card, loaded.text, self.driver, context.limits, config.router, clock, context.slices
        )
        self._heartbeat = Heartbeat(
            context.router_id,
            self.driver,
            self.metrics,
            loaded.registry,
            clock,
            context.troubles,
        )
        self._clock = clock
        self._siblings = context.siblings
        self._traffic_topic = f"traffic of {self.name}"
        self._quarantine_topic = f"quarantine of {self.name}"
        self._siblings.answer(self._traffic_topic, self._own_traffic)
        self._siblings.answer(self._quarantine_topic, self._own_quarantine)
        self.view = ClusterView(self.driver, loaded.registry, self._heartbeat, self.name, config)
        self.adapters = AdapterOperations(
            self.name,
            card.adapters,
            config.adapters,
            loaded.registry,
            lambda: self.driver.compatible,
            context.siblings,
            sleeps=self.driver.sleeps,
        )
        self.page = StatusPage(
            self.frontend, self.driver, self._traffic, self.view, clock, self._siblings
        )

    def serves(self, name: str) -> bool:
        """Whether `name` is the name of this model or of one of its adapters."""
        return name == self.name or self.card.adapters.get(name) is not None

    async def status(self) -> ClusterStatus:
        """Returns the status of the model's pools and of this router."""
        return await self.view.status((await self._traffic()).load)

    async def _traffic(self) -> RouterTraffic:
        """Returns the traffic of all processes of this router."""
        others = await self._siblings.ask(self._traffic_topic, Traffic.from_json)
        return RouterTraffic((self._heartbeat.traffic(), *others))

    async def _own_traffic(self) -> bytes:
        return self._heartbeat.traffic().to_json()

    async def _own_quarantine(self) -> bytes:
        return self.driver.dispatcher.quarantine.known(self._clock.now())

    async def _learn_quarantine(self) -> None:
        """Adds what the other processes of this router have in quarantine, again and again."""
        while self._siblings.number is not None:
            quarantine = self.driver.dispatcher.quarantine
            await self._siblings.ask(self._quarantine_topic, quarantine.learn)
            await asyncio.sleep(LEARN_S)

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for one in (
                self.driver.run(),
                self._heartbeat.run(),
                self.page.run(),
                self.adapters.run(),
                follow_changes(self.registry, self.driver.look_soon, self.adapters.look_soon),
                self._learn_quarantine(),
            ):
                tasks.create_task(one)

    async def warm_up(self) -> None:
        """Starts what the first request would wait for, unless the model sleeps from the start."""
        if not self._starts_asleep:
            await self.frontend.guidance.warm_up()

    async def close(self) -> None:
        """Removes the router's entry from the registry, and ends the helper processes."""
        await self.frontend.guidance.close()
        await self._heartbeat.end()
        await self._tracing.close()
