"""Hands over again and again, breaks off at random, and counts what is left behind:
`python tests/unit/kv_transfer/soak_handoffs.py --handoffs 10000`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

# The packages that folders of tests are named after
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.transfer_ends import LAYOUT, DecodeEnd, MemoryFile, decode_end, sender_of

from kv_transfer.push import Push
from kv_transfer.sender import Sender
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.errors import Cancelled, FailedPrecondition, NotFound, Unavailable
from kvrelay.worker_messages import HandoffTarget

TRANSPORTS = ["memory", "shm", "grpc", "gloo"]
ENDINGS = [
    "commit",
    "commit",
    "commit",
    "abort",
    "cancel",
    "close the lease",
    "expire the lease",
    "close the sender",
]
NUM_BLOCKS = 64
AT_ONCE = 4
GROUPS_KEPT = 64  # by a receiver, of senders that went; see `ReceiverGroups`
TIMEOUT_S = 0.5  # seconds; what a group whose other half never comes is waited for
PART = 1000
MIB = 2**20
POOL_THREADS = 8  # by which gRPC's own pools differ from one look to the next
# gRPC keeps a connection (two descriptors, as both ends are in this process) of a few channels
# that were closed with calls under way: two or three of 3,000 hand-offs.
KEPT_DESCRIPTORS = 4
HANDOFFS_PER_DESCRIPTOR = 250


@dataclass(frozen=True)
class Residue:
    """What a process holds."""

    descriptors: int
    threads: int
    memory_files: int  # open
    mappings: int  # of memory files
    tasks: int
    rss_mib: float

    @property
    def counts(self) -> tuple[int, ...]:
        """All but the memory, which never stands still."""
        return self.descriptors, self.threads, self.memory_files, self.mappings, self.tasks

    @classmethod
    def now(cls) -> Residue:
        gc.collect()
        links = [_link(entry) for entry in Path("/proc/self/fd").iterdir()]
        maps = Path("/proc/self/maps").read_text().splitlines()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            descriptors=len(links),
            threads=len(list(Path("/proc/self/task").iterdir())),
            memory_files=sum("kvrelay-" in link for link in links),
            mappings=sum("kvrelay-" in line for line in maps),
            tasks=len(asyncio.all_tasks()),
            rss_mib=pages * os.sysconf("SC_PAGE_SIZE") / MIB,
        )


def _link(entry: Path) -> str:
    with contextlib.suppress(OSError):  # the listing's own
        return str(entry.readlink())
    return ""


class Soak:
    """Hand-offs between two ends of one process. Ends that are opened again are others, with an
    arena of their own.
    """

    def __init__(self, decode: DecodeEnd, draw: random.Random) -> None:
        self._decode = decode
        self._draw = draw
        self._cache = KvCache(NUM_BLOCKS, LAYOUT.block_size)
        self._stack = contextlib.AsyncExitStack()
        self._sender: Sender | None = None
        self._numbers = 0
        self.endings: Counter[str] = Counter()

    async def reopen(self) -> None:
        await self.close()
        self._sender = await self._stack.enter_async_context(
            sender_of(MemoryFile(num_blocks=NUM_BLOCKS), timeout_s=TIMEOUT_S)
        )

    async def close(self) -> None:
        await self._stack.aclose()
        self._sender = None

    async def hand_over(self, count: int) -> None:
        """`count` of them, some at a time."""
        remaining = count

        async def work() -> None:
            nonlocal remaining
            while remaining > 0:
                remaining -= 1
                await self.one(self._draw.choice(TRANSPORTS), self._draw.choice(ENDINGS))

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())
        self.collect()

    async def commit(self, transport: str) -> None:
        """Hands over until one hand-off is committed: on a busy machine a group may be given up
        before it is made.
        """
        committed = "commit: committed"
        before = self.endings[committed]
        async with asyncio.timeout(30):
            while self.endings[committed] == before:
                await self.one(transport, "commit")

    async def one(self, transport: str, ending: str) -> None:
        draw, decode, sender = self._draw, self._decode, self._sender
        assert sender is not None
        self._numbers += 1
        if ending == "close the sender" and draw.random() > 0.1:
            ending = "commit"
        blocks = self._cache.allocate(draw.randint(1, 8))
        target = decode.grant(blocks, key=(f"r{self._numbers}", 0), transport=transport)
        push = sender.open((f"r{self._numbers}", 0), target)
        cut = draw.randint(0, len(blocks))
        sources = draw.sample(range(NUM_BLOCKS), len(blocks))
        push.send(0, sources[:cut])
        await self._a_moment()
        push.send(cut, sources[cut:])
        await self._a_moment()
        committing = asyncio.create_task(push.commit(1, len(blocks) * LAYOUT.block_size, 0.0))
        if ending != "commit":
            await self._break_off(ending, push, committing, target)
        outcome = "committed"
        try:
            await committing
        except (
            asyncio.CancelledError,
            Cancelled,
            FailedPrecondition,
            NotFound,
            Unavailable,
        ) as error:
            outcome = type(error).__name__
        await push.abort()
        await decode.receiver.end(target.lease_id)
        self.collect()
        self.endings[f"{ending}: {outcome}"] += 1

    async def _break_off(
        self, ending: str, push: Push, committing: asyncio.Task[object], target: HandoffTarget
    ) -> None:
        await self._a_moment()
        match ending:
            case "abort":
                await push.abort()
            case "cancel":
                committing.cancel()
            case "close the lease":
                await self._decode.receiver.end(target.lease_id)
            case "expire the lease":
                self._decode.clock.advance(11.0)
                for lease in self._decode.leases.expire(self._decode.clock.now()):
                    self._decode.receiver.revoke(lease.lease_id)
            case "close the sender":
                await self.reopen()

    async def _a_moment(self) -> None:
        for _ in range(self._draw.choice([0, 0, 1, 3, 10])):
            await asyncio.sleep(0)
        if self._draw.random() < 0.2:
            await asyncio.sleep(self._draw.random() * 0.005)

    def collect(self) -> None:
        """Blocks of leases that are over; those of committed ones belong to sequences, which end
        here at once.
        """
        self._decode.leases.check_integrity()
        for lease in self._decode.leases.release():
            self._cache.release(lease.blocks)
        for lease, _, _ in self._decode.committed:
            self._cache.release(lease.blocks)
        self._decode.committed.clear()

    async def residue(self) -> Residue:
        """What is left while both ends are open and idle."""
        async with asyncio.timeout(30):
            while (
                self._decode.receiver.under_way
                or len(self._decode.leases)
                or self._cache.pool.num_held
            ):
                await asyncio.sleep(0.01)
                self.collect()
        self._cache.check_integrity()
        for _ in range(GROUPS_KEPT + 1):  # hand-offs that failed have left fewer of them
            await self.reopen()
            await self.commit("gloo")
        gc.collect()  # ends that were closed are gone now, which the next push by shm takes note of
        for transport in TRANSPORTS:
            await self.commit(transport)
        return await self._settled()

    async def _settled(self) -> Residue:
        """What is held once that has not changed for longer than a half of a group waits for the
        other: gRPC and gloo take closed connections down in threads of their own.
        """
        loop = asyncio.get_running_loop()
        residue, since = Residue.now(), loop.time()
        async with asyncio.timeout(60):
            while loop.time() < since + 2 * TIMEOUT_S:
                await asyncio.sleep(TIMEOUT_S / 5)
                now = Residue.now()
                if now.counts != residue.counts:
                    since = loop.time()
                residue = now
        return residue


async def soak(handoffs: int, seed: int) -> tuple[Residue, Residue, Counter[str]]:
    """Before, after, and how the hand-offs ended."""
    async with decode_end(num_blocks=NUM_BLOCKS, timeout_s=TIMEOUT_S) as decode:
        run = Soak(decode, random.Random(seed))
        await run.reopen()
        await run.hand_over(max(200, handoffs // 10))
        before = await run.residue()
        run.endings.clear()
        for done in range(0, handoffs, PART):
            print(f"{done} hand-offs, {Residue.now().rss_mib:.1f} MiB", file=sys.stderr)
            await run.hand_over(min(PART, handoffs - done))
        after = await run.residue()
        await run.close()
    return before, after, run.endings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--handoffs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rss-mib", type=float, default=16.0, help="that resident memory may grow by"
    )
    arguments = parser.parse_args()
    allowed = {
        "rss_mib": arguments.rss_mib,
        "threads": POOL_THREADS,
        "descriptors": KEPT_DESCRIPTORS + arguments.handoffs // HANDOFFS_PER_DESCRIPTOR,
    }
    before, after, endings = asyncio.run(soak(arguments.handoffs, arguments.seed))
    for ending, count in sorted(endings.items()):
        print(f"{count:6} {ending}")
    grown = []
    for name in (field.name for field in fields(Residue)):
        was, now = getattr(before, name), getattr(after, name)
        print(f"{name:>14}: {was:g} before, {now:g} after")
        if now > was + allowed.get(name, 0):
            grown.append(name)
    if grown:
        sys.exit(f"left behind: {', '.join(grown)}; seed {arguments.seed}")


if __name__ == "__main__":
    main()
