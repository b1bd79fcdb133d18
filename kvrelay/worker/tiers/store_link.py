"""One store as a worker sees it: its connection, the blocks on their way to it, and whether it
works.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from itertools import islice, takewhile

import grpc
import numpy as np

from kv_transfer.blocks.single_blocks import BlockCopy
from kv_transfer.channels import Channels
from kvrelay.clock import Clock
from kvrelay.errors import KvRelayError
from kvrelay.process.telemetry import get_logger
from kvrelay.types.kv_block import BlockKey
from kvrelay.wire.kv_frame import KvOpen
from kvrelay.wire.status import error_from_rpc, task_cancelled
from kvrelay.wire.store import (
    MAX_CALL_BLOCKS,
    MAX_CALLS,
    StoreBlocks,
    StoreStatus,
    frames_of,
    records_of,
    store_find,
    store_forget,
    store_get,
    store_put,
    store_status,
)
from kvrelay.wire.transfer import frame_to_bytes
from kvrelay.worker.tiers.block_file import HEADER_BYTES, BadBlockFile, BlockHeader, Records
from kvrelay.worker.tiers.doubts import Doubts
from kvrelay.worker.tiers.tier import StoredBlock, TierCounts
from kvrelay.worker.tiers.tier_errors import note_error

# Bytes of one Put.
_BATCH_BYTES = 8 * 2**20
# Timeouts in seconds: of a search, for which a prompt waits; between two frames of a Get; of a Put,
# which may wait for its turn.
_FIND_S, _SILENCE_S, _PUT_S = 0.2, 0.5, 15.0
_GET_S, _STATUS_S = 10.0, 1.0
# Seconds between two questions for the status.
_STATUS_EVERY_S = 5.0
# Seconds for which a store is skipped after an error; they double up to the second number.
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
# Blocks that are known to be in the store, and the seconds after which the store is asked again,
# since it may have evicted them.
_KNOWN, _KNOWN_S = 2**16, 60.0
# Blocks that the store has to forget when it works again: those of several contexts of a million
# tokens. Each takes about 200 bytes.
_MOST_DOOMED = 2**18

log = get_logger("worker")


class StoreLink:
    """Puts blocks in the background, and gets blocks on request. Lives on the worker's event loop.

    After an error or a timeout the store is skipped: it is not asked, and no block waits for it.
    Only an answer to a question for its status ends that, so no prompt waits for a store that is
    down.
    """

    def __init__(
        self,
        address: str,
        layout: str,
        block_bytes: int,
        staging_bytes: int,
        channels: Channels,
        clock: Clock,
        counts: TierCounts,
        drained: asyncio.Event,
    ) -> None:
        """layout: the hash that stands for model, layout and dtype of the weights. staging_bytes:
        of blocks that wait. drained: set when there may be room again.
        """
        self.address = address
        # False until the store answers, and after an error.
        self.works = False
        counts.skipped += 1
        # What the store said last.
        self.status = StoreStatus()
        self._layout = layout
        self._block_bytes = block_bytes
        self._most_waiting = max(1, staging_bytes // block_bytes)
        self._channels = channels
        self._clock = clock
        self._counts = counts
        self._drained = drained
        # Blocks that are not in the store yet, by identity.
        self._waiting: OrderedDict[bytes, StoredBlock] = OrderedDict()
        # Identity -> when the store was known to have the block.
        self._known: OrderedDict[bytes, float] = OrderedDict()
        # Blocks that the store has to forget, until it has answered that it did, with the number of
        # the last doubt. They are not read.
        self._doomed: dict[bytes, int] = {}
        # How often a block had to be forgotten.
        self._doubts = 0
        self._searches = Doubts()
        # True if there were too many of them. Then nothing is read.
        self._distrusted = False
        # Searches and reads at a time. A store refuses more calls of one connection.
        self._calls = asyncio.Semaphore(MAX_CALLS // 2)
        self._wake = asyncio.Event()
        self._lost = asyncio.Event()
        self._pause = _PAUSE_S
        # The operation of the last error.
        self._failed_at = "status"

    # What waits for the store

    @property
    def has_room(self) -> bool:
        """True if the store works and takes a block now."""
        return self.works and len(self._waiting) < self._most_waiting

    @property
    def is_drained(self) -> bool:
        """True if no block waits to be put or forgotten, or the store does not work."""
        return not (self._waiting or self._doomed) or not self.works

    def waits(self, identity: bytes) -> StoredBlock | None:
        """The block if it waits to be put."""
        return self._waiting.get(identity)

    def knows(self, identity: bytes) -> bool:
        """True if the block waits, or the store had it a short time ago."""
        if identity in self._waiting:
            return True
        known = self._known.get(identity, float("-inf"))
        return self._trusts(identity) and self._clock.now() - known < _KNOWN_S

    def offer(self, block: StoredBlock) -> bool:
        """Takes a block to put, after the store has forgotten what it has to; its tenant is a
        folder's name. Returns False if there is no room.
        """
        if not self.has_room:
            return False
        self._waiting[block.key.identity] = block
        self._wake.set()
        return True

    def forget(self, identity: bytes) -> None:
        """Has the store forget a block, now or when it works again. Until then the block is not
        read.
        """
        self._doubts += 1
        self._searches.note(identity)
        self._waiting.pop(identity, None)
        if identity in self._doomed or len(self._doomed) < _MOST_DOOMED:
            self._doomed[identity] = self._doubts
            self._wake.set()
        elif not self._distrusted:
            self._distrusted = True
            reason = f"{self.address}: {_MOST_DOOMED} blocks have to be forgotten; reads end"
            note_error(self._counts, "remote", "forget", reason)

    def _trusts(self, identity: bytes) -> bool:
        """False if the store may have KV in doubt for the block."""
        return not self._distrusted and identity not in self._doomed

    # Running

    async def run(self) -> None:
        """Watches the store and puts what waits, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._work())

    async def _watch(self) -> None:
        """Asks for the status from time to time. An answer makes the link work again."""
        while True:
            self._lost.clear()
            if await self._answers():
                try:
                    async with asyncio.timeout(_STATUS_EVERY_S):
                        await self._lost.wait()
                except TimeoutError:
                    continue
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)

    async def _answers(self) -> bool:
        if not self.works:
            # The address may belong to another process now.
            self._known.clear()
        try:
            self.status = await store_status(self._channels.get(self.address), _STATUS_S)
        # A tier only saves time. Without it the worker serves on.
        except Exception as error:  # noqa: BLE001
            self._failed("status", error)
            return False
        if not self.works:
            log.info("kv_store_opened", store=self.address, blocks=self.status.blocks)
            self._counts.skipped -= 1
        self.works = True
        self._wake.set()
        self._drained.set()
        return True

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                while self.works and (self._waiting or self._doomed):
                    await self._forget_some()
                    await self._put_some()
                    self._drained.set()
            except asyncio.CancelledError:
                if task_cancelled():
                    raise
                # gRPC cancels the calls of a channel that is closed.
                self._failed("write", TimeoutError())
            except Exception as error:  # noqa: BLE001
                self._failed("write", error)

    async def _forget_some(self) -> None:
        """Has the store forget all that it has to. What is put later is not among it."""
        while self.works and self._doomed:
            some = dict(islice(self._doomed.items(), MAX_CALL_BLOCKS))
            await store_forget(self._channels.get(self.address), self._named(tuple(some)), _PUT_S)
            for identity, doubt in some.items():
                self._known.pop(identity, None)
                # Another worker may have stored its copy before a second doubt.
                if self._doomed[identity] == doubt:
                    del self._doomed[identity]

    async def _put_some(self) -> None:
        """Puts some blocks of one tenant that the store does not have."""
        batch = self._next_batch()
        if not batch:
            return
        named = self._named([block.key.identity for block in batch])
        found = await store_find(self._channels.get(self.address), named, _PUT_S)
        missing = [block for block, held in zip(batch, found, strict=True) if not held]
        if missing:
            began = self._clock.now()
            channel = self._channels.get(self.address)
            await store_put(channel, self._frames(missing), _PUT_S)
            self._counts.written(len(missing) * self._block_bytes, self._clock.now() - began)
            self._counts.stored += len(missing)
        self._proved("write")
        for block in batch:
            identity = block.key.identity
            if self._waiting.get(identity) is block:
                del self._waiting[identity]
                self._learn(identity)

    def _next_batch(self) -> list[StoredBlock]:
        most = min(MAX_CALL_BLOCKS, max(1, _BATCH_BYTES // self._block_bytes))
        batch: list[StoredBlock] = []
        for block in self._waiting.values():
            if len(batch) == most:
                break
            if not batch or block.key.tenant == batch[0].key.tenant:
                batch.append(block)
        return batch

    async def _frames(self, blocks: Sequence[StoredBlock]) -> AsyncIterator[bytes]:
        yield frame_to_bytes(
            KvOpen(
                "",
                0,
                0,
                0,
                0,
                self._layout,
                "grpc",
                identities=b"".join(block.key.identity for block in blocks),
                tenant=blocks[0].key.tenant,
            )
        )
        for frame in frames_of(map(self._record, blocks)):
            yield frame

    def _record(self, block: StoredBlock) -> tuple[bytes, memoryview]:
        identity, data = block.key.identity, block.copy.data
        header = BlockHeader(self._layout, identity, len(data), block.copy.digest)
        return header.pack(), memoryview(data.data)

    # Reading

    async def find(self, identities: Sequence[bytes]) -> list[bool]:
        """Whether the store has each of the blocks; all False if it does not answer in time."""
        found: list[bool] = []
        # An answer may be older than the store's confirmation that it forgot a block.
        trusted = [self._trusts(identity) for identity in identities]
        try:
            with self._searches.meanwhile() as doubted:
                for first in range(0, len(identities), MAX_CALL_BLOCKS):
                    part = identities[first : first + MAX_CALL_BLOCKS]
                    async with self._calls:
                        channel = self._channels.get(self.address)
                        found += await store_find(channel, self._named(part), _FIND_S)
        except (grpc.RpcError, KvRelayError) as error:
            self._failed("find", error)
            return [False] * len(identities)
        self._proved("find")
        found = [
            held and sound and identity not in doubted
            for held, sound, identity in zip(found, trusted, identities, strict=True)
        ]
        for identity, held in zip(identities, found, strict=True):
            if held:
                self._learn(identity)
            else:
                self._known.pop(identity, None)
        return found

    async def get(self, keys: Sequence[BlockKey]) -> list[StoredBlock]:
        """The leading blocks that the store returns. They were not checked for their digests."""
        found: list[StoredBlock] = []
        keys = list(takewhile(lambda key: self._trusts(key.identity), keys))
        if not keys:
            return found
        try:
            for first in range(0, len(keys), MAX_CALL_BLOCKS):
                part = keys[first : first + MAX_CALL_BLOCKS]
                async with self._calls:
                    await self._get(part, found)
                if len(found) < first + len(part):
                    break
        except BadBlockFile as error:
            bad = keys[len(found)].identity
            note_error(self._counts, "remote", "read", f"{self.address}: {error}")
            self.forget(bad)
        except (grpc.RpcError, KvRelayError, TimeoutError) as error:
            self._failed("read", error)
        else:
            self._proved("read")
        return found

    async def _get(self, keys: Sequence[BlockKey], found: list[StoredBlock]) -> None:
        """Appends to `found`. Raises what the call raises, BadBlockFile, and TimeoutError."""
        named = self._named([key.identity for key in keys])
        async with aclosing(store_get(self._channels.get(self.address), named, _GET_S)) as frames:
            missing = deque(keys)
            records = Records(lambda header: self._check(header, missing))
            while missing:
                data = await self._next(frames)
                if data is None:
                    self._known.pop(missing[0].identity, None)
                    return
                for header, record in records.of(records_of(data)):
                    view = np.frombuffer(record[HEADER_BYTES:], np.uint8)
                    copy = BlockCopy(view, header.digest)
                    found.append(StoredBlock(missing.popleft(), copy))

    async def _next(self, frames: AsyncIterator[bytes]) -> bytes | None:
        """The next frame; None at the end. Raises what the call raises, and TimeoutError."""
        began = self._clock.now()
        try:
            async with asyncio.timeout(_SILENCE_S):
                return await anext(frames, None)
        except asyncio.CancelledError:
            # A prompt does not wait as long for a store that is lost.
            if self._clock.now() - began > _FIND_S:
                self._failed("read", TimeoutError())
            raise

    def _check(self, header: BlockHeader, missing: deque[BlockKey]) -> None:
        """Raises BadBlockFile for a block that was not asked for."""
        if not missing:
            raise BadBlockFile("the frame holds more blocks than were asked for")
        header.check(self._layout, missing[0].identity, self._block_bytes)

    # Whether it works

    def _failed(self, operation: str, error: Exception) -> None:
        """Skips the store for some time. What waits is lost."""
        if isinstance(error, grpc.RpcError):
            reason = error_from_rpc(error, self.address).message
        elif isinstance(error, TimeoutError):
            reason = f"{self.address}: no answer in time"
        elif isinstance(error, KvRelayError):
            reason = f"{self.address}: {error}"
        else:
            log.error("kv_tier_failed", tier="remote", store=self.address, exc_info=error)
            reason = f"{self.address}: {error!r}"
        note_error(self._counts, "remote", operation, reason)
        self._failed_at = operation
        # Other calls may fail for the same reason.
        if self.works or not self._lost.is_set():
            log.warning("kv_store_skipped", store=self.address, seconds=self._pause, reason=reason)
        if self.works:
            self._counts.skipped += 1
        self.works = False
        self._counts.dropped += len(self._waiting)
        self._waiting.clear()
        self.status = StoreStatus()
        # A new call makes a new connection, without gRPC's wait of up to two minutes. Those under
        # way have timeouts of their own, all of which are shorter.
        self._channels.retire(self.address, self._channels.get(self.address), 2 * _PUT_S)
        self._drained.set()
        self._lost.set()

    def _proved(self, operation: str) -> None:
        """Notes that a call of the data path has succeeded. A store that answers some calls and not
        others is skipped for longer each time.
        """
        if self.works and self._failed_at in (operation, "status"):
            self._pause = _PAUSE_S

    def _learn(self, identity: bytes) -> None:
        self._known[identity] = self._clock.now()
        self._known.move_to_end(identity)
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)

    def _named(self, identities: Sequence[bytes]) -> StoreBlocks:
        return StoreBlocks(self._layout, tuple(identities))
