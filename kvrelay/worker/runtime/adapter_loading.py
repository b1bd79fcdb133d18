"""Keeps a worker's adapters as the registry lists them, beside those of its configuration."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvrelay.config.adapters import AdaptersConfig
from kvrelay.errors import KvRelayError, ModelRefused, Unavailable
from kvrelay.models.adapters.adapter_reading import read_in_time
from kvrelay.process.telemetry import get_logger
from kvrelay.state.registry import Registry
from kvrelay.types.control_plane import AdapterEntry
from kvrelay.worker.worker import Worker

POLL_S = 0.5
# Seconds for which a starting worker puts off its registration until it has the listed adapters.
START_S = 10.0

log = get_logger("worker")


class AdapterLoading:
    """Loads what is listed, and unloads what is not, once no sequence uses it. Lives on the
    worker's event loop.

    Files are read and checked in a thread of their own. The engine's thread takes a finished
    adapter between two steps.
    """

    def __init__(self, worker: Worker, registry: Registry, config: AdaptersConfig) -> None:
        self._worker = worker
        self._registry = registry
        self._max_rank = config.max_rank
        self._table = worker.context.runner.adapters
        # Adapters of the configuration, which stay.
        self._configured = frozenset(self._table.ids)
        # Why adapters were not loaded, by id. They are tried again once they are listed anew.
        self._refused: dict[str, str] = {}

    async def catch_up(self) -> None:
        """Loads what is listed, for at most START_S. Call it before the worker registers.

        Requests wait while no decode worker is registered. A worker that registers without their
        adapter would end them, since the router cannot tell it from a worker that has unloaded it.
        """
        with suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(START_S):
                await self.follow(await self._registry.adapters())

    async def run(self) -> None:
        """Follows the registry until cancelled. While it is not available, nothing changes."""
        while True:
            with suppress(Unavailable):
                await self.follow(await self._registry.adapters())
            await asyncio.sleep(POLL_S)

    async def follow(self, entries: tuple[AdapterEntry, ...]) -> None:
        """Loads and unloads adapters so that those of `entries` are loaded."""
        wanted = {entry.adapter_id: entry for entry in entries}
        for adapter_id in self._table.held:
            if adapter_id not in wanted and adapter_id not in self._configured:
                await self._unload(adapter_id)
        self._refused = {one: why for one, why in self._refused.items() if one in wanted}
        for adapter_id, entry in wanted.items():
            if adapter_id not in self._table.ids and adapter_id not in self._refused:
                await self._load(entry)
        self._tell()

    async def _load(self, entry: AdapterEntry) -> None:
        worker = self._worker.context.identity.worker_id
        try:
            if self._table.held and entry.adapter_id in self._table.held:
                self._table.keep(entry.adapter_id)
            else:
                await self._read(entry)
        # A folder that makes torch or the system raise must not end the worker.
        except Exception as error:  # noqa: BLE001
            reason = error.message if isinstance(error, KvRelayError) else f"{error!r:.200}"
            self._refused[entry.adapter_id] = reason
            log.warning("adapter_refused", worker=worker, adapter=entry.name, reason=reason)
            return
        log.info("adapter_loaded", worker=worker, adapter=entry.name, id=entry.adapter_id)
        self._tell()

    async def _read(self, entry: AdapterEntry) -> None:
        """Raises ModelRefused."""
        engine = self._worker.context.engine
        await engine.call(self._table.find_sites)
        files = await read_in_time(entry.path, self._max_rank)
        if files.adapter_id != entry.adapter_id:
            raise ModelRefused(
                f"{entry.path}: the files here are version {files.adapter_id[:8]}, and the router "
                f"read version {entry.adapter_id[:8]}; give all machines the same files"
            )
        adapter = await asyncio.to_thread(self._table.prepare, files, entry.name)
        await engine.call(lambda: self._table.install(adapter))

    async def _unload(self, adapter_id: str) -> None:
        """From now on no new sequence gets the adapter. It is removed when no sequence has it."""
        self._table.retire(adapter_id)
        self._tell()
        sequences = self._worker.stage.sequences()
        if not any(sequence.spec.adapter == adapter_id for sequence in sequences):
            # Behind the running step, which may still have a sequence that has ended.
            await self._worker.context.engine.call(lambda: self._table.remove(adapter_id))
            log.info(
                "adapter_unloaded", worker=self._worker.context.identity.worker_id, id=adapter_id
            )

    def _tell(self) -> None:
        """Publishes a heartbeat soon if the adapters have changed."""
        heartbeat = self._worker.heartbeat
        if (self._table.ids, self._refused) != (heartbeat.adapters, heartbeat.refused_adapters):
            heartbeat.adapters = self._table.ids
            heartbeat.refused_adapters = dict(self._refused)
            self._worker.state_changed.set()
