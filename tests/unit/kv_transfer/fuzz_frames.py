"""Damages valid pushes and looks at what becomes of them: `python
tests/unit/kv_transfer/fuzz_frames.py --seconds 120`.

Each seed is one push: valid at first, which must be taken; then damaged, once for the parser alone
and once for a receiver behind a real gRPC server. The seed of what goes wrong is printed; `--seed
N` runs that one again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import grpc
import xxhash

# The packages that folders of tests are named after
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.transfer_ends import HASH, LAYOUT, SENDER, DecodeEnd, MemoryFile, decode_end

from kv_transfer.blocks.arena import digests_of, places_in, read_blocks
from kv_transfer.blocks.plan import Layers, byte_ranges
from kv_transfer.lease import Lease
from kv_transfer.push_call import PushCall
from kv_transfer.transports.memory import register_sender
from kv_transfer.transports.named import NamedOutbound
from kvrelay.errors import (
    Cancelled,
    DataLoss,
    FailedPrecondition,
    KvRelayError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from kvrelay.types.kv_layout import KvLayout, LayerKv
from kvrelay.wire.transfer import (
    Frame,
    KvBlocks,
    KvCommit,
    KvOpen,
    RemoteArena,
    SharedSegment,
    VllmBlocks,
    commit_digest,
    frame_from_bytes,
    frame_to_bytes,
)

UNLIKE = replace(LAYOUT, block_size=8)
NUM_BLOCKS = 24
# A list of small numbers takes a byte for each on the wire, and in Python a pointer, or 36 bytes
# from 257 on.
BYTES_PER_BYTE, BYTES_BESIDES = 32, 2**14
# What a receiver says of a push that it refuses. Others would be errors that nobody has foreseen.
REFUSALS = (
    Cancelled,
    DataLoss,
    FailedPrecondition,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
INTS = [-(2**63), -(2**31), -1, 0, 1, 2, 3, 2**31 - 1, 2**31, 2**63 - 1, 2**64 - 1]
TEXTS = [
    "",
    "x",
    "\0\n\x1b[2J",
    "x" * 5000,
    "ж" * 3000,
    "grpc",
    "memory",
    "shm",
    "gloo",
    "nccl",
    "vllm-nixl",
    "xxh3",
    "multilinear",
]
ABSENT: dict[str, Any] = {
    "layout": LAYOUT,
    "segment": SharedSegment(1, 0, 1000, 1),
    "arena": RemoteArena(b"x", 0, 1000),
    "digests": (1, 2),
    "source_blocks": (1, 2),
    "payload": (b"",),
    "in_vllm": VllmBlocks("engine", "s1", "127.0.0.1", 5600, (1, 2), 1.0, 1.0),
}
NUMBERS = [
    b"\xff" * 9 + b"\x01",
    b"\xff" * 10,
    b"\x80" * 12,
    b"\xff\xff\xff\xff\x0f",
    b"\x00",
    b"\x0a\x80\x80\x80\x80\x7f",
]


@dataclass(frozen=True)
class Wish:
    """A valid push, but for the lease it goes to."""

    source: MemoryFile
    transport: str
    cached_blocks: int
    num_blocks: int
    num_tokens: int
    partial: bool
    blocks: tuple[KvBlocks, ...]

    @classmethod
    def draw(cls, draw: random.Random, sources: Sequence[MemoryFile]) -> Wish:
        source = draw.choice(sources)
        theirs = source.layout
        num_blocks = draw.randint(1, 6)
        cached_blocks = draw.randrange(num_blocks)
        partial = draw.random() < 0.3
        least = cached_blocks if partial else num_blocks - 1
        num_tokens = draw.randint(least * LAYOUT.block_size + 1, num_blocks * LAYOUT.block_size)
        first = cached_blocks * LAYOUT.block_size // theirs.block_size
        numbers = draw.sample(range(source.num_blocks), theirs.blocks_for(num_tokens) - first)
        transport = draw.choice(["grpc", "grpc", "memory", "shm"])
        blocks: list[KvBlocks] = []
        while numbers:
            count = draw.randint(1, len(numbers))
            run, numbers = numbers[:count], numbers[count:]
            cuts = draw.choice([[Layers(0, 2)], [Layers(0, 1), Layers(1, 1)]])
            blocks += [
                _blocks(source, transport, len(blocks) + n, first, run, cut)
                for n, cut in enumerate(cuts)
            ]
            first += count
        return cls(source, transport, cached_blocks, num_blocks, num_tokens, partial, tuple(blocks))

    def frames(self, lease: Lease, epoch: int, capability: str = "") -> list[Frame]:
        opening = KvOpen(*lease.key, lease.lease_id, epoch, lease.generation, HASH, self.transport)
        opening = replace(opening, sender=SENDER, capability=capability)
        if self.source.layout != LAYOUT:
            opening = replace(
                opening, layout_hash="other", model_id="test", layout=self.source.layout
            )
        if self.transport != "grpc":
            opening = NamedOutbound(self.source, digests=True).announce(opening)
        digests = b"".join(
            one.to_bytes(8, "little") for frame in self.blocks for one in frame.digests
        )
        commit = KvCommit(
            len(self.blocks),
            commit_digest(xxhash.xxh3_64(digests), 42, self.num_tokens),
            42,
            self.num_tokens,
        )
        return [opening, *self.blocks, commit]


def _blocks(
    source: MemoryFile,
    transport: str,
    sequence: int,
    first: int,
    numbers: Sequence[int],
    layers: Layers,
) -> KvBlocks:
    payload = read_blocks(source, numbers, layers).numpy().tobytes()
    header = KvBlocks(sequence, first, len(numbers), layers.first, layers.num, len(payload))
    header = replace(header, digests=digests_of(source, numbers, layers))
    return (
        replace(header, payload=(payload,))
        if transport == "grpc"
        else replace(header, source_blocks=tuple(numbers))
    )


class Damage:
    """What can happen to a push on its way, or be thought of by a peer who means harm."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def of(self, frames: Sequence[Frame]) -> list[bytes]:
        frames = list(frames)
        ways = self._draw.choices(["fields", "order", "bytes"], k=self._draw.choice([1, 1, 2, 3]))
        for _ in range(ways.count("fields")):
            at = self._draw.randrange(len(frames))
            frames[at] = self._other(frames[at])
        messages = [frame_to_bytes(frame) for frame in frames]
        for _ in range(ways.count("order")):
            self._disorder(messages)
        for _ in range(ways.count("bytes")):
            if messages:
                at = self._draw.randrange(len(messages))
                messages[at] = self._garbled(messages[at])
        return messages

    def _other(self, frame: Frame) -> Frame:
        """With another value in one field, if the wire can carry it."""
        name = self._draw.choice(fields(frame)).name
        value = getattr(frame, name)
        changed = replace(
            frame, **{name: self._value(ABSENT[name] if value in (None, ()) else value)}
        )
        with contextlib.suppress(ValueError):
            frame_to_bytes(changed)
            return changed
        return frame

    def _value(self, value: Any) -> Any:
        draw = self._draw
        match value:
            case int():
                return draw.choice([value + 1, value - 1, value ^ 1 << draw.randrange(32), *INTS])
            case float():
                return draw.choice([value + 1, -value, float("inf"), 1e300])
            case str():
                return draw.choice(TEXTS)
            case tuple() if value and isinstance(value[0], int):
                return draw.choice(
                    [
                        (),
                        value[1:],
                        value + value,
                        value[::-1],
                        value * 1000,
                        self._with_another(value),
                    ]
                )
            case bytes():
                return draw.randbytes(draw.choice([0, 1, 100, 10_000]))
            case tuple() if value and isinstance(value[0], LayerKv):
                return draw.choice([(), value[1:], value + value, value * 30_000])
            case tuple():
                return draw.choice([(), (draw.randbytes(draw.choice([1, 100, 10_000])),)])
            case KvLayout():
                changes = {
                    "block_size": draw.choice(INTS[1:8]),
                    "dtype": draw.choice(["float16", "int8", "int4", "x"]),
                }
                name = draw.choice([*changes, "word"])
                return replace(value, **{name: changes.get(name, draw.choice([1, 2, 3]))})
            case None:
                return value
            case _:
                name = draw.choice(fields(value)).name
                return replace(value, **{name: self._value(getattr(value, name))})

    def _with_another(self, value: tuple[int, ...]) -> tuple[int, ...]:
        at = self._draw.randrange(len(value))
        return (*value[:at], self._value(value[at]), *value[at + 1 :])

    def _disorder(self, messages: list[bytes]) -> None:
        draw = self._draw
        at, other = (draw.randrange(len(messages)) for _ in range(2)) if messages else (0, 0)
        match draw.randrange(5):
            case 0:
                del messages[at : at + 1]
            case 1:
                messages[at:at] = messages[other : other + 1]
            case 2:
                draw.shuffle(messages)
            case 3:
                messages.insert(at, draw.randbytes(draw.randrange(50)))
            case 4:
                del messages[at:]

    def _garbled(self, message: bytes) -> bytes:
        draw, data = self._draw, bytearray(message)
        for _ in range(draw.choice([1, 1, 1, 5])):
            # What says how to read the frame is at its beginning.
            at = (
                min(len(data), int(draw.expovariate(0.1)))
                if draw.random() < 0.7
                else draw.randint(0, len(data))
            )
            end = at + draw.choice([1, 2, 8, 1000])
            match draw.randrange(6):
                case 0 if at < len(data):
                    data[at] ^= 1 << draw.randrange(8)
                case 1:
                    data[at : at + 1] = bytes([draw.choice([0, 1, 0x7F, 0x80, 0xFF])])
                case 2:
                    data[at:at] = draw.choice(NUMBERS)
                case 3:
                    data[at:at] = data[at:end]
                case 4:
                    del data[at:end]
                case _:
                    del data[at:]
        return bytes(data)


def parse(messages: Sequence[bytes]) -> None:
    """Each one is a frame, which is the same once written and read again, or refused; and costs
    memory by its size.
    """
    for message in messages:
        frame = None
        tracemalloc.start()
        with contextlib.suppress(FailedPrecondition):
            frame = frame_from_bytes(message)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        limit = BYTES_PER_BYTE * len(message) + BYTES_BESIDES
        assert used <= limit, f"{used} bytes were allocated for a frame of {len(message)}"
        if frame is not None:
            again = frame_from_bytes(frame_to_bytes(frame))
            assert again == frame, f"{frame} became {again}"


class Target:
    """A decode worker's end, and another request's lease, which nothing may touch."""

    def __init__(self, decode: DecodeEnd, channel: grpc.aio.Channel) -> None:
        self._decode = decode
        self._channel = channel

    async def take(
        self, request: Wish, damage: Damage | None, draw: random.Random, like: list[bytes]
    ) -> str:
        """Returns what it was refused for. `like`: what the blocks hold after a commit; empty where
        that is learnt.
        """
        decode = self._decode
        numbers = draw.sample(range(NUM_BLOCKS), request.num_blocks + 2)
        leases, now = decode.leases, decode.clock.now()
        others = leases.grant(("other", 0), numbers[-2:], 0, 10.0, now)
        lease = leases.grant(
            ("r", 0), numbers[:-2], request.cached_blocks, 10.0, now, partial=request.partial
        )
        frames = request.frames(lease, leases.epoch, decode.receiver.capability(lease, SENDER))
        messages = damage.of(frames) if damage else [frame_to_bytes(frame) for frame in frames]
        expected = decode.arena.buffer.clone()
        async with asyncio.timeout(60):
            refusal = await self._push(messages)
            while decode.receiver.under_way:
                await asyncio.sleep(0)
        leases.check_integrity()
        for offset, length in byte_ranges(places_in(decode.arena), lease.writable):
            expected[offset : offset + length] = decode.arena.buffer[offset : offset + length]
        assert decode.arena.buffer.equal(expected), "a block outside of the lease was written to"
        committed = [(one.lease_id, count) for one, _, count in decode.committed]
        assert committed in ([], [(lease.lease_id, request.num_tokens)]) or (
            damage and len(committed) == 1
        ), committed
        if committed:
            ((lease_id, num_tokens),) = committed
            assert lease_id == lease.lease_id, "another lease was committed"
            assert refusal is None or damage, refusal
            arrived = [
                decode.arena.block(n) for n in lease.blocks[: LAYOUT.blocks_for(num_tokens)]
            ][request.cached_blocks :]
            like = like or arrived
            assert arrived == like[: len(arrived)], (
                "something else was committed than what was sent"
            )
        else:
            assert damage, f"a valid push was refused: {refusal}"
            assert isinstance(refusal, REFUSALS), repr(refusal)
        if damage is None:
            like[:] = arrived
        decode.committed.clear()
        for one in (lease, others):
            leases.close(one.lease_id)
        released = leases.release()
        assert others in released
        assert (lease in released) != bool(committed)
        assert not len(leases)
        return type(refusal).__name__ if refusal else "taken"

    async def _push(self, messages: Sequence[bytes]) -> KvRelayError | None:
        """What it was refused for."""
        call = PushCall(self._channel, "the receiver", 10.0)
        try:
            for message in messages:
                await call.write(message)
            await call.receipt()
        except KvRelayError as error:
            return error
        finally:
            await call.close()
        return None


async def run(seeds: Sequence[int] | None, seconds: float) -> Counter[str]:
    """These seeds, or random ones for as long. Raises AssertionError; the seed has been printed
    then.
    """
    sources = [MemoryFile(num_blocks=NUM_BLOCKS), MemoryFile(UNLIKE, num_blocks=NUM_BLOCKS)]
    for source in sources:
        register_sender(source)
    outcomes: Counter[str] = Counter()
    end = time.monotonic() + seconds
    async with (
        decode_end(num_blocks=NUM_BLOCKS, timeout_s=2.0) as decode,
        grpc.aio.insecure_channel(decode.address) as channel,
    ):
        target = Target(decode, channel)
        pending = iter(seeds or iter(lambda: random.randrange(2**32), None))
        while (seeds or time.monotonic() < end) and (seed := next(pending, None)) is not None:
            try:
                outcomes[await one_push(seed, target, sources)] += 1
            except BaseException:
                print(
                    f"seed {seed} fails; to run it again: python {sys.argv[0]} --seed {seed}",
                    file=sys.stderr,
                )
                raise
    return outcomes


async def one_push(seed: int, target: Target, sources: Sequence[MemoryFile]) -> str:
    draw = random.Random(seed)
    request = Wish.draw(draw, sources)
    frames = request.frames(Lease(1, 1, ("r", 0), (), 0), 7)
    parse([frame_to_bytes(frame) for frame in frames])
    for _ in range(3):
        parse(Damage(draw).of(frames))
    like: list[bytes] = []
    await target.take(request, None, draw, like)
    return await target.take(request, Damage(draw), draw, like)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, action="append")
    arguments = parser.parse_args()
    outcomes = asyncio.run(run(arguments.seed, arguments.seconds))
    print(
        f"{outcomes.total()} damaged pushes:",
        ", ".join(f"{count} {name}" for name, count in outcomes.most_common()),
    )


if __name__ == "__main__":
    main()
