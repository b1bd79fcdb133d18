"""The gRPC service of a store: KvStoreService."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc
import xxhash

from kvrelay.errors import (
    DataLoss,
    DeadlineExceeded,
    InvalidArgument,
    KvRelayError,
    ResourceExhausted,
)
from kvrelay.kv_store.block_store import BlockStore
from kvrelay.protocol_version import Protocol, ours
from kvrelay.wire.kv_frame import KvOpen
from kvrelay.wire.status import abort
from kvrelay.wire.store import (
    MAX_BLOCK_BYTES,
    MAX_CALLS,
    StoreBlocks,
    StoreStatus,
    asker_of_status,
    check_opening,
    forgotten,
    found_to_proto,
    frames_of,
    pb,
    receipt_of,
    records_of,
    status_to_proto,
    store_blocks_from_proto,
)
from kvrelay.wire.transfer import frame_from_bytes
from kvrelay.wire.transfer import pb as transfer_pb
from kvrelay.worker.tiers.block_file import HEADER_BYTES, BadBlockFile, BlockHeader, Records

# Puts of all connections that are read at a time. Each has one frame in memory, and one of them a
# block that is larger than a frame.
MAX_PUTS = 8
# Of these, puts of one connection. A worker has one at a time.
MAX_OWN_PUTS = 2
# Seconds that a call may wait for its worker, and bytes that it has to move in each second more.
WAIT_S, RATE = 5.0, 2**24
# Seconds that a Put may wait with a large block, which is read one at a time.
HURRY_S = 1.0


class KvStoreService:
    """Serves the blocks of a `BlockStore`. Lives on one event loop, and never waits for a disk.

    What a worker puts is checked before it is stored: the header names the layout, the block and
    the length that the call has announced, and the bytes have their digest. So a block that was
    torn or changed on its way is never stored. Workers check what they get in the same way.
    """

    def __init__(self, blocks: BlockStore) -> None:
        self.blocks = blocks
        # Blocks that Get returned.
        self.found = 0
        self._calls: Counter[str] = Counter()
        self._puts = asyncio.Semaphore(MAX_PUTS)
        self._large_block = asyncio.Lock()
        # By connection.
        self._own_puts: Counter[str] = Counter()

    @property
    def status(self) -> StoreStatus:
        """What the store holds now."""
        blocks = self.blocks
        return StoreStatus(
            blocks.size_bytes,
            blocks.used_bytes,
            len(blocks),
            blocks.num_tenants,
            blocks.stored,
            blocks.evicted,
            self.found,
        )

    async def Find(
        self, request: pb.StoreBlocksRequest, context: grpc.aio.ServicerContext
    ) -> pb.FindBlocksResponse:
        """Says which blocks are here. They become the most recently used of their tenants."""
        try:
            with self._call(context):
                named = _named(request)
                layout = named.layout_hash
                return found_to_proto(
                    [self.blocks.touch((layout, one)) for one in named.identities]
                )
        except KvRelayError as error:
            await abort(context, error)

    async def Get(self, request: pb.StoreBlocksRequest, context: grpc.aio.ServicerContext) -> None:
        """Writes the frames of the leading blocks that are here."""
        try:
            with self._call(context):
                await self._get(_named(request), context.write)
        except KvRelayError as error:
            await abort(context, error)

    async def Put(
        self, request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> transfer_pb.KvReceipt:
        """Stores blocks, each as soon as it has arrived whole."""
        try:
            with self._call(context), self._own_put(context):
                async with self._puts:
                    return await self._put(request_iterator)
        except KvRelayError as error:
            await abort(context, error)

    async def Forget(
        self, request: pb.StoreBlocksRequest, context: grpc.aio.ServicerContext
    ) -> pb.ForgetBlocksResponse:
        """Removes blocks."""
        try:
            with self._call(context):
                named = _named(request)
                for identity in named.identities:
                    self.blocks.forget((named.layout_hash, identity))
                return forgotten()
        except KvRelayError as error:
            await abort(context, error)

    async def GetStoreStatus(
        self, request: pb.GetStoreStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetStoreStatusResponse:
        """Says how full the store is."""
        try:
            with self._call(context):
                _check(asker_of_status(request))
                return status_to_proto(self.status)
        except KvRelayError as error:
            await abort(context, error)

    def _leading(self, named: StoreBlocks) -> Iterator[tuple[bytes]]:
        """The records of the leading blocks that are here."""
        for identity in named.identities:
            record = self.blocks.get((named.layout_hash, identity))
            if record is None:
                return
            self.found += 1
            yield (record,)

    async def _get(self, named: StoreBlocks, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Ends early, without an error, if the worker reads too slowly: an aborted call would keep
        its block until the worker has read the frames before.
        """
        budget = _WaitBudget()
        for frame in frames_of(self._leading(named)):
            try:
                async with budget.waiting():
                    await write(frame)
            except TimeoutError:
                return
            budget.moved(len(frame))

    async def _put(self, frames: AsyncIterator[bytes]) -> transfer_pb.KvReceipt:
        arrival = _Arrival(frames)
        opening = frame_from_bytes(await arrival.next())
        if not isinstance(opening, KvOpen):
            raise InvalidArgument(f"a Put begins with an open frame, not {type(opening).__name__}")
        _check(opening.protocol)
        layout, identities, num_bytes = opening.layout_hash, check_opening(opening), 0
        announced = deque(identities)

        def check(header: BlockHeader) -> None:
            if not announced:
                raise InvalidArgument("a frame holds more blocks than were announced")
            header.check(layout, announced[0], header.block_bytes)
            self._check_size(HEADER_BYTES + header.block_bytes)

        def store(data: bytes) -> int:
            stored = 0
            for record in _undamaged(records, data):
                self.blocks.put((layout, announced.popleft()), opening.tenant, bytes(record))
                stored += len(record)
            return stored

        records = Records(check)
        while announced:
            num_bytes += store(await arrival.next())
            if not records.is_whole:
                async with self._large_block:
                    arrival.hurry()
                    while not records.is_whole:
                        num_bytes += store(await arrival.next())
        return receipt_of(len(identities), num_bytes)

    def _check_size(self, record_bytes: int) -> None:
        """Raises ResourceExhausted for a record that can never be stored."""
        most = min(MAX_BLOCK_BYTES, self.blocks.tenant_bytes)
        if record_bytes > most or not self.blocks.fits(record_bytes):
            raise ResourceExhausted(
                f"a block takes {record_bytes} bytes, and allowed are {most}; start the store with "
                "a larger size"
            )

    @contextmanager
    def _call(self, context: grpc.aio.ServicerContext) -> Iterator[None]:
        """Counts a call of a connection. Raises ResourceExhausted for too many."""
        with _counted(self._calls, context, MAX_CALLS, "calls"):
            yield

    @contextmanager
    def _own_put(self, context: grpc.aio.ServicerContext) -> Iterator[None]:
        """The same for puts. So a client that is silent does not hold all of them."""
        with _counted(self._own_puts, context, MAX_OWN_PUTS, "puts"):
            yield


@contextmanager
def _counted(
    counts: Counter[str], context: grpc.aio.ServicerContext, most: int, what: str
) -> Iterator[None]:
    peer = context.peer()
    if counts[peer] >= most:
        raise ResourceExhausted(
            f"the connection has {most} {what} in progress; wait for one to end",
            retry_after_s=1.0,
        )
    counts[peer] += 1
    try:
        yield
    finally:
        counts[peer] -= 1
        if not counts[peer]:
            del counts[peer]


def _named(request: pb.StoreBlocksRequest) -> StoreBlocks:
    named = store_blocks_from_proto(request)
    _check(named.protocol)
    return named


def _check(peer: Protocol) -> None:
    """Raises FailedPrecondition for a worker of another version."""
    ours().check(peer, "the worker")


class _WaitBudget:
    """The time that a call may wait for its worker, which has to move bytes at a rate."""

    def __init__(self) -> None:
        # Seconds that the call may wait at most, and still.
        self.most = self._left = WAIT_S

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Raises TimeoutError in the body when the time is over."""
        clock = asyncio.get_running_loop().time
        began = clock()
        async with asyncio.timeout(self._left):
            yield
        self._left -= clock() - began

    def limit(self, seconds: float) -> None:
        """Takes what the call may wait beyond `seconds`."""
        self.most = seconds
        self._left = min(self._left, seconds)

    def moved(self, num_bytes: int) -> None:
        """Gives the call more time for what it has moved."""
        self._left = min(self.most, self._left + num_bytes / RATE)


class _Arrival:
    """The frames of a Put."""

    def __init__(self, frames: AsyncIterator[bytes]) -> None:
        self._frames = frames
        self._budget = _WaitBudget()

    async def next(self) -> bytes:
        """The next frame. Raises InvalidArgument at the end, and DeadlineExceeded for a Put that is
        too slow.
        """
        try:
            async with self._budget.waiting():
                data = await anext(self._frames)
        except StopAsyncIteration:
            raise InvalidArgument("the Put ended before all of its blocks had arrived") from None
        except TimeoutError:
            raise DeadlineExceeded(
                f"the Put is too slow: it may wait for {self._budget.most:g} s, and a second "
                f"longer for each {RATE >> 20} MiB that it brings"
            ) from None
        self._budget.moved(len(data))
        return data

    def hurry(self) -> None:
        """Lets the Put wait for less: others wait for it."""
        self._budget.limit(HURRY_S)


def _undamaged(records: Records, data: bytes) -> Iterator[memoryview]:
    """The records that end in a frame. Raises InvalidArgument for a frame without the blocks that
    were announced, and DataLoss for one whose bytes have changed.
    """
    try:
        for header, record in records.of(records_of(data)):
            if xxhash.xxh3_64_intdigest(record[HEADER_BYTES:]) != header.digest:
                raise DataLoss("the bytes of a block do not have their digest")
            yield record
    except BadBlockFile as error:
        raise InvalidArgument(str(error)) from None
