"""Adapters that an operator loads and unloads while the cluster serves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from kvrelay.config.adapters import AdaptersConfig, check_model_name
from kvrelay.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from kvrelay.models.adapters.adapter_files import read_adapter
from kvrelay.process.telemetry import get_logger
from kvrelay.types.control_plane import AdapterEntry
from kvrelay.types.workers import WorkerInfo
from kvrelay.wire.adapters import AdapterStatus
from router.frontend.adapter_cards import AdapterCard, AdapterCards, folder_name
from router.runtime.worker_directory import RouterRegistry

# Time for all workers to load an adapter.
LOAD_S = 60.0
# A load that the list has for longer than this was begun by a router that has ended.
ABANDONED_S = LOAD_S + 10.0
# Names of all adapters. Several names may have the same files.
MAX_NAMES = 1024
POLL_S = 0.1
# Pause between two reads of the list that other routers may have changed.
FOLLOW_S = 1.0

log = get_logger("router.adapters")


class AdapterOperations:
    """Loads adapters on all workers or on none.

    The registry lists the loaded adapters. Workers follow the list; requests can name an adapter
    once all workers have it. If a worker refuses it, the list loses it again.
    """

    def __init__(
        self,
        base: str,
        cards: AdapterCards,
        config: AdaptersConfig,
        registry: RouterRegistry,
        workers: Callable[[], Sequence[WorkerInfo]],
        is_taken: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """`base` is the name of the base model; `workers` returns the known workers; `is_taken`
        tells whether another model has a name.
        """
        self._base = base
        self._cards = cards
        self._config = config
        self._registry = registry
        self._workers = workers
        self._is_taken = is_taken
        self._configured = {card.name: card for card in cards}
        self._paths = {one.name: one.path for one in config.serve}
        # One change at a time.
        self._turn = asyncio.Lock()
        # Loads of other routers, and the times of the event loop at which the list had them first.
        self._loading: dict[AdapterEntry, float] = {}

    async def run(self) -> None:
        """Serves what the list says, and undoes abandoned loads, until cancelled. While the
        registry is unavailable, nothing changes.
        """
        while True:
            with suppress(Unavailable):
                async with self._turn:
                    entries = await self._registry.adapters()
                    self._serve(entries)
                    await self._undo_abandoned(entries)
            await asyncio.sleep(FOLLOW_S)

    async def _undo_abandoned(self, entries: tuple[AdapterEntry, ...]) -> None:
        now = asyncio.get_running_loop().time()
        self._loading = {one: self._loading.get(one, now) for one in entries if not one.served}
        for entry, since in self._loading.items():
            if now - since > ABANDONED_S:
                await self._registry.remove_adapter(entry.name)
                log.warning("abandoned_load_undone", adapter=entry.name, id=entry.adapter_id)

    async def listed(self) -> list[AdapterStatus]:
        """Returns all adapters, those of the configuration first. Raises Unavailable."""
        known = self._workers()
        configured = [
            AdapterEntry(card.name, self._paths[card.name], card.adapter_id, served=True)
            for card in self._configured.values()
        ]
        listed = await self._registry.adapters()
        return [
            AdapterStatus(
                entry.name,
                entry.path,
                entry.adapter_id,
                entry.served,
                configured=place < len(configured),
                workers=sum(entry.adapter_id in one.adapters for one in known),
            )
            for place, entry in enumerate([*configured, *listed])
        ]

    async def load(self, name: str, path: str) -> AdapterStatus:
        """Loads the adapter in the folder `path`, which all workers must be able to read. Does
        nothing if it is loaded, and completes a load that another router has begun.

        Raises InvalidArgument for the name or the path, ModelRefused for the folder,
        FailedPrecondition if the name is taken, there is no room or a worker refuses the adapter,
        DeadlineExceeded if a worker does not answer, and Unavailable.
        """
        self._check_name(name)
        if not os.path.isabs(path) or len(path) > 512 or not path.isprintable():
            raise InvalidArgument(
                f"path {path!r:.100} is not the absolute path of a folder; all workers read it",
                field="path",
            )
        files = await asyncio.to_thread(read_adapter, path, self._config.max_rank)
        entry = AdapterEntry(name, path, files.adapter_id)
        async with self._turn:
            known = {one.name: one for one in await self._registry.adapters()}
            if known.get(name) == replace(entry, served=True):
                self._serve(tuple(known.values()))
                return await self._found(name)
            if known.get(name) != entry:
                self._check_room(entry, known)
            await self._registry.put_adapter(entry)
            try:
                await self._until_loaded(entry)
                entry = replace(entry, served=True)
                await self._registry.put_adapter(entry)
            except BaseException:
                await asyncio.shield(self._registry.remove_adapter(name))
                raise
            known[name] = entry
            self._serve(tuple(known.values()))
        log.info("adapter_served", adapter=name, id=entry.adapter_id)
        return await self._found(name)

    async def unload(self, name: str) -> None:
        """Stops serving an adapter. Requests that run with it end as they would have. Raises
        NotFound, FailedPrecondition for one of the configuration, and Unavailable.
        """
        if name in self._configured:
            raise FailedPrecondition(
                f"adapter {name!r:.100} is in the configuration; remove it there and restart the "
                "cluster",
                field="name",
            )
        async with self._turn:
            known = {one.name: one for one in await self._registry.adapters()}
            if known.pop(name, None) is None:
                raise NotFound(
                    f"adapter {name!r:.100} is not loaded; `kvrelay adapters list` shows all",
                    field="name",
                )
            await self._registry.remove_adapter(name)
            self._serve(tuple(known.values()))
        log.info("adapter_unloaded", adapter=name)

    def _check_name(self, name: str) -> None:
        try:
            check_model_name(name)
        except ValueError as error:
            raise InvalidArgument(str(error), field="name") from None
        if self._is_taken(name):
            raise FailedPrecondition(
                f"{name!r:.100} is the name of another model; choose another", field="name"
            )
        if name == self._base or name in self._configured:
            owner = "the base model" if name == self._base else "an adapter of the configuration"
            raise FailedPrecondition(
                f"{name!r:.100} is the name of {owner}; choose another", field="name"
            )

    def _check_room(self, entry: AdapterEntry, known: dict[str, AdapterEntry]) -> None:
        if entry.name in known:
            raise FailedPrecondition(
                f"adapter {entry.name!r} is loaded from {known[entry.name].path}, version "
                f"{known[entry.name].adapter_id[:8]}; unload it first, or choose another name",
                field="name",
            )
        if len(known) + len(self._configured) >= MAX_NAMES:
            raise FailedPrecondition(f"{MAX_NAMES} names are loaded; unload one first")
        ids = {one.adapter_id for one in self._configured.values()}
        ids.update(one.adapter_id for one in known.values())
        if len({*ids, entry.adapter_id}) > self._config.max_loaded:
            raise FailedPrecondition(
                f"{len(ids)} adapters are loaded, as many as adapters.max_loaded allows; unload "
                "one first"
            )

    async def _until_loaded(self, entry: AdapterEntry) -> None:
        """Waits until all workers that may get requests have the adapter. Raises
        FailedPrecondition and DeadlineExceeded.
        """
        try:
            async with asyncio.timeout(LOAD_S):
                # No event tells of every change of a heartbeat.
                while missing := self._missing(entry):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{', '.join(missing)[:200]} did not load the adapter within {LOAD_S:g} s; no "
                "worker serves it"
            ) from None

    def _missing(self, entry: AdapterEntry) -> list[str]:
        """The workers that lack the adapter. Raises FailedPrecondition if there are no workers, or
        if one refuses it.
        """
        workers = [one for one in self._workers() if one.state in ("starting", "ready")]
        if not workers:
            raise FailedPrecondition(
                "no worker is ready to load the adapter; try again later, and if the decode pool "
                "is empty until a request waits, send a request first"
            )
        for worker in workers:
            for text in worker.refused_adapters:
                refused, _, reason = text.partition(" ")
                if refused == entry.adapter_id:
                    raise FailedPrecondition(f"{worker.worker_id} refuses it: {reason}")
        return [one.worker_id for one in workers if entry.adapter_id not in one.adapters]

    async def _found(self, name: str) -> AdapterStatus:
        return next(one for one in await self.listed() if one.name == name)

    def _serve(self, entries: tuple[AdapterEntry, ...]) -> None:
        loaded = [
            AdapterCard(one.name, one.adapter_id, folder_name(one.path))
            for one in entries
            if one.served and one.name != self._base
        ]
        self._cards.replace({card.name: card for card in loaded} | self._configured)
