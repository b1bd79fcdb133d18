"""Adapters that an operator loads and unloads while the cluster serves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

from kvrelay.config.adapters import AdaptersConfig, check_model_name
from kvrelay.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from kvrelay.models.adapters.adapter_reading import read_in_time
from kvrelay.process.telemetry import get_logger
from kvrelay.types.control_plane import AdapterEntry
from kvrelay.types.workers import WorkerInfo
from kvrelay.wire.adapters import AdapterStatus
from router.frontend.adapter_cards import AdapterCard, AdapterCards, folder_name
from router.runtime.worker_directory import RouterRegistry
from router.sibling_processes import Siblings

# Time for all workers to load an adapter.
LOAD_S = 60.0
# A load that the list has for longer than this was begun by a router that has ended.
ABANDONED_S = LOAD_S + 10.0
# Names of all adapters. Several names may have the same files.
MAX_NAMES = 1024
POLL_S = 0.1
# Longest pause between two reads of the list that other routers may have changed.
FOLLOW_S = 1.0
# Time for the other processes of this router to follow a change.
SIBLINGS_S = 5.0
# Answer of a process that does not serve an adapter.
_NOT_SERVED = "none"

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
        siblings: Siblings,
        *,
        sleeps: bool = False,
    ) -> None:
        """
        - base: name of the base model.
        - workers: returns the known workers.
        - siblings: the other processes of this router.
        - sleeps: the model may have no workers while there are no requests.
        """
        self._base = base
        self._cards = cards
        self._config = config
        self._registry = registry
        self._workers = workers
        self._sleeps = sleeps
        self._configured = {card.name: card for card in cards}
        self._paths = {one.name: one.path for one in config.serve}
        # Those of the other models of this router.
        self.others: Sequence[AdapterOperations] = ()
        # One reader of the list at a time, so that no later list is replaced by an earlier one.
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        # Loads of all routers, and the times of the event loop at which the list had them first.
        self._loading: dict[AdapterEntry, float] = {}
        self._siblings = siblings
        self._topic = f"adapters of {base}"
        self._questions = count()
        siblings.answer(self._topic, self._follows)

    @property
    def fixed_names(self) -> frozenset[str]:
        """The names of the base model and of the adapters in the configuration."""
        return frozenset({self._base, *self._configured})

    async def run(self) -> None:
        """Serves what the list says, and undoes abandoned loads, until cancelled. While the
        registry is unavailable, nothing changes.
        """
        while True:
            self._changed.clear()
            with suppress(Unavailable):
                await self._undo_abandoned(await self._follow())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), FOLLOW_S)

    def look_soon(self) -> None:
        """Reads the list before the next regular time."""
        self._changed.set()

    async def _follow(self) -> tuple[AdapterEntry, ...]:
        """Serves what the list says. Returns the list. Raises Unavailable."""
        async with self._turn:
            entries = await self._registry.adapters()
            self._serve(entries)
        return entries

    async def _undo_abandoned(self, entries: tuple[AdapterEntry, ...]) -> None:
        now = asyncio.get_running_loop().time()
        self._loading = {one: self._loading.get(one, now) for one in entries if not one.served}
        for entry, since in self._loading.items():
            if now - since > ABANDONED_S:
                await self._registry.withdraw_adapter(entry)
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
                model=self._base,
                refused=next(filter(None, (_refusal(one, entry) for one in known)), ""),
            )
            for place, entry in enumerate([*configured, *listed])
        ]

    async def load(self, name: str, path: str) -> AdapterStatus:
        """Loads the adapter in the folder `path`, which all workers must be able to read. Does
        nothing if it is loaded, and completes a load that another router has begun. If the model
        sleeps, its next workers load the adapter before they get requests.

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
        await self._check_others(name)
        files = await read_in_time(path, self._config.max_rank)
        entry = AdapterEntry(name, path, files.adapter_id)
        known = {one.name: one for one in await self._registry.adapters()}
        if known.get(name) == replace(entry, served=True):
            self._check_use(entry)
        else:
            if known.get(name) != entry:
                self._check_room(entry, known)
            await self._publish(entry)
            log.info("adapter_served", adapter=name, id=entry.adapter_id)
        await self._follow()
        await self._follow_everywhere(name, entry.adapter_id)
        return await self._found(name)

    async def _publish(self, entry: AdapterEntry) -> None:
        """Lists the adapter, and marks it as served when all workers have it. Otherwise it is not
        listed. Raises the errors of `load`.
        """
        if not await self._registry.put_adapter(entry):
            raise FailedPrecondition(
                f"another folder was loaded as {entry.name!r} meanwhile; choose another name, or "
                "unload that one first",
                field="name",
            )
        try:
            # After the entry is listed, so that one of two loads at two models sees the other.
            await self._check_others(entry.name)
            await self._until_loaded(entry)
            if not await self._registry.put_adapter(replace(entry, served=True)):
                raise FailedPrecondition(
                    f"adapter {entry.name!r} was unloaded while it was loading; load it again",
                    field="name",
                )
        except BaseException:
            await asyncio.shield(self._registry.withdraw_adapter(entry))
            raise

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
        if not await self.lists(name):
            raise NotFound(
                f"adapter {name!r:.100} is not loaded; `kvrelay adapters list` shows all",
                field="name",
            )
        await self._registry.remove_adapter(name)
        await self._follow()
        await self._follow_everywhere(name, "")
        log.info("adapter_unloaded", adapter=name)

    async def lists(self, name: str) -> bool:
        """Whether the list has the name, served or not. Raises Unavailable."""
        return any(one.name == name for one in await self._registry.adapters())

    async def _follow_everywhere(self, name: str, adapter_id: str) -> None:
        """Waits until all processes of this router serve this version of the name; an empty one if
        they stop serving it. Goes on without a process that has ended or takes long.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(SIBLINGS_S):
                while True:
                    # The number keeps an earlier answer from being taken for this one's.
                    found = await self._siblings.ask(
                        self._topic,
                        lambda text: text == (adapter_id or _NOT_SERVED).encode(),
                        name=name,
                        number=next(self._questions),
                    )
                    if sum(found) == self._siblings.others:
                        return
                    await asyncio.sleep(POLL_S)

    async def _follows(self, name: str, number: int) -> bytes:
        """Answers another process: the version of the name that this one serves now."""
        with suppress(Unavailable):
            await self._follow()
        card = self._cards.get(name)
        return (_NOT_SERVED if card is None else card.adapter_id).encode()

    def _check_name(self, name: str) -> None:
        try:
            check_model_name(name)
        except ValueError as error:
            raise InvalidArgument(str(error), field="name") from None
        if name in self.fixed_names:
            owner = "the base model" if name == self._base else "an adapter of the configuration"
            raise FailedPrecondition(
                f"{name!r:.100} is the name of {owner}; choose another", field="name"
            )

    async def _check_others(self, name: str) -> None:
        for other in self.others:
            if name in other.fixed_names or await other.lists(name):
                raise FailedPrecondition(
                    f"{name!r:.100} is the name of another model, or of its adapter; choose "
                    "another",
                    field="name",
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
        """The workers that lack the adapter. Raises FailedPrecondition if one refuses it, or if
        there are no workers and the model does not sleep.
        """
        workers = [one for one in self._workers() if one.state in ("starting", "ready")]
        if not workers and not self._sleeps:
            raise FailedPrecondition("no worker is ready to load the adapter; try again later")
        for worker in workers:
            if refused := _refusal(worker, entry):
                raise FailedPrecondition(refused)
        return [one.worker_id for one in workers if entry.adapter_id not in one.adapters]

    def _check_use(self, entry: AdapterEntry) -> None:
        """Raises FailedPrecondition if the adapter is listed, and the workers refuse it: they were
        not there when it was loaded.
        """
        if refused := self._refused_by_all(entry):
            raise FailedPrecondition(f"{refused}; unload it first, then load it again")

    def _refused_by_all(self, entry: AdapterEntry) -> str:
        """The first worker's refusal if all ready decode workers refuse the adapter, else empty."""
        refusals = [_refusal(one, entry) for one in self._decoders()]
        return refusals[0] if refusals and all(refusals) else ""

    def _decoders(self) -> list[WorkerInfo]:
        return [one for one in self._workers() if one.pool == "decode" and one.state == "ready"]

    async def _found(self, name: str) -> AdapterStatus:
        for one in await self.listed():
            if one.name == name:
                return one
        raise FailedPrecondition(
            f"adapter {name!r} was unloaded after it was loaded; load it again", field="name"
        )

    def _serve(self, entries: tuple[AdapterEntry, ...]) -> None:
        reserved = self.fixed_names.union(*(one.fixed_names for one in self.others))
        loaded = [
            AdapterCard(one.name, one.adapter_id, folder_name(one.path))
            for one in entries
            if one.served and one.name not in reserved and self._can_serve(one)
        ]
        self._cards.replace({card.name: card for card in loaded} | self._configured)

    def _can_serve(self, entry: AdapterEntry) -> bool:
        """Whether requests may name a listed adapter. Requests wait while there are no workers, and
        the first worker loads the list before it gets them. This router may learn later than the
        one that loaded the adapter which workers have it.
        """
        workers = self._decoders()
        if not workers or any(entry.adapter_id in one.adapters for one in workers):
            return True
        card = self._cards.get(entry.name)
        is_served = card is not None and card.adapter_id == entry.adapter_id
        return is_served and not self._refused_by_all(entry)


def _refusal(worker: WorkerInfo, entry: AdapterEntry) -> str:
    """Name and reason of a worker that refuses the adapter, else empty."""
    for text in worker.refused_adapters:
        adapter_id, _, reason = text.partition(" ")
        if adapter_id == entry.adapter_id:
            return f"{worker.worker_id} refuses it: {reason}"
    return ""
