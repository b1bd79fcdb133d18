"""Faults of messages, and at messages: each waits for its packet, once."""

from __future__ import annotations

from collections.abc import Callable

from simulation.chaos import Chaos
from simulation.network import Packet

from kvrelay.wire.transfer import KvBlocks, KvCommit, KvOpen, frame_from_bytes
from kvrelay.wire.worker import command_from_proto, pb
from kvrelay.worker_messages import Prefill, Reserve, RunLocal

ARMED_S = 3.0  # how long a tamper waits for its packet
SESSION_GREETING = b"\x0a"  # first byte of hello and of welcome, which come once by protocol
CACHE_UPDATE = b"\x3a"  # first byte of a cache update from a worker, and of a router's resync


def _arm(chaos: Chaos, tamper: Callable[[Packet], list[Packet] | None]) -> None:
    """Until it has replaced one packet, or its time is over."""
    network = chaos.cluster.network

    def once(packet: Packet) -> list[Packet] | None:
        changed = tamper(packet)
        if changed is not None:
            disarm()
        return changed

    def disarm() -> None:
        if once in network.tampers:
            network.tampers.remove(once)

    network.tampers.append(once)
    chaos.later(ARMED_S, disarm)


def _is_frame(packet: Packet, *kinds: type) -> bool:
    if packet.call.method != "Push" or not packet.to_server or packet.kind != "message":
        return False
    return isinstance(frame_from_bytes(packet.data), kinds)


def _with(packet: Packet, data: bytes) -> Packet:
    return Packet(packet.call, packet.to_server, packet.kind, data)


async def flip_bit(chaos: Chaos) -> None:
    def tamper(packet: Packet) -> list[Packet] | None:
        if not _is_frame(packet, KvBlocks, KvCommit):
            return None
        data = bytearray(packet.data)
        bit = chaos.rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        chaos.cluster.note("flip a bit of a KV frame")
        return [_with(packet, bytes(data))]

    _arm(chaos, tamper)


async def truncate_frame(chaos: Chaos) -> None:
    def tamper(packet: Packet) -> list[Packet] | None:
        if not _is_frame(packet, KvBlocks):
            return None
        chaos.cluster.note("truncate a KV frame")
        return [_with(packet, packet.data[: chaos.rng.randrange(len(packet.data))])]

    _arm(chaos, tamper)


async def double_frame(chaos: Chaos) -> None:
    def tamper(packet: Packet) -> list[Packet] | None:
        if not _is_frame(packet, KvBlocks, KvCommit):
            return None
        chaos.cluster.note("send a KV frame twice")
        return [packet, packet]

    _arm(chaos, tamper)


async def lose_frame(chaos: Chaos) -> None:
    def tamper(packet: Packet) -> list[Packet] | None:
        if not _is_frame(packet, KvBlocks):
            return None
        chaos.cluster.note("lose a KV frame")
        return []

    _arm(chaos, tamper)


async def swap_frames(chaos: Chaos) -> None:
    kept: list[Packet] = []

    def tamper(packet: Packet) -> list[Packet] | None:
        if not _is_frame(packet, KvBlocks, KvCommit):
            return None
        if not kept:
            kept.append(packet)
            chaos.cluster.network.tampers.append(second)
            return []
        return None

    def second(packet: Packet) -> list[Packet] | None:
        if packet.call is not kept[0].call or packet.kind != "message":
            return None
        chaos.cluster.network.tampers.remove(second)
        chaos.cluster.note("swap two KV frames")
        return [packet, kept[0]]

    _arm(chaos, tamper)


async def lose_receipt(chaos: Chaos) -> None:
    def tamper(packet: Packet) -> list[Packet] | None:
        if packet.call.method != "Push" or packet.kind != "status" or packet.data[0].name != "OK":
            return None
        chaos.cluster.note("lose a receipt")
        connection = packet.call._connection
        if connection is not None:
            connection.server.soon(0, connection.break_side, connection.server, "lost")
        return []

    _arm(chaos, tamper)


async def repeat_command(chaos: Chaos) -> None:
    await _repeat(chaos, to_server=True, kind="give a command twice")


async def repeat_event(chaos: Chaos) -> None:
    await _repeat(chaos, to_server=False, kind="tell an event twice")


async def _repeat(chaos: Chaos, *, to_server: bool, kind: str) -> None:
    """At once, or later in the same order of things."""
    skip, later = chaos.rng.randrange(4), chaos.rng.choice((0.0, 0.0, 0.05, 0.5, 2.0))

    def tamper(packet: Packet) -> list[Packet] | None:
        nonlocal skip
        session = (
            packet.call.method == "Session"
            and packet.kind == "message"
            and packet.to_server is to_server
        )
        if not session or packet.data.startswith((SESSION_GREETING, CACHE_UPDATE)):
            return None
        if to_server and not isinstance(_command(packet), Reserve | Prefill | RunLocal):
            return None  # those that begin something
        skip -= 1
        if skip >= 0:
            return None
        chaos.cluster.note(kind)
        connection = packet.call._connection
        if connection is not None and later:
            chaos.later(later, connection.send, packet)
            return [packet]
        return [packet, packet]

    _arm(chaos, tamper)


def _is_about_the_cache(packet: Packet) -> bool:
    """An update of a worker, or a router's wish for a snapshot."""
    return (
        packet.call.method == "Session"
        and packet.kind == "message"
        and packet.data.startswith(CACHE_UPDATE)
    )


async def lose_update(chaos: Chaos) -> None:
    """Some in a row, and perhaps the answer to them."""
    left = chaos.rng.choice((1, 1, 2, 4))

    def tamper(packet: Packet) -> list[Packet] | None:
        nonlocal left
        if not _is_about_the_cache(packet):
            return None
        left -= 1
        if left == 0:
            chaos.cluster.network.tampers.remove(tamper)
        chaos.cluster.note("lose a cache update")
        return []

    chaos.cluster.network.tampers.append(tamper)


async def repeat_update(chaos: Chaos) -> None:
    later = chaos.rng.choice((0.0, 0.05, 0.5, 2.0))

    def tamper(packet: Packet) -> list[Packet] | None:
        if not _is_about_the_cache(packet):
            return None
        chaos.cluster.note("tell a cache update twice")
        connection = packet.call._connection
        if connection is not None and later:
            chaos.later(later, connection.send, packet)
            return [packet]
        return [packet, packet]

    _arm(chaos, tamper)


async def swap_updates(chaos: Chaos) -> None:
    kept: list[Packet] = []

    def tamper(packet: Packet) -> list[Packet] | None:
        if not _is_about_the_cache(packet) or packet.to_server:
            return None
        if not kept:
            kept.append(packet)
            return []
        if packet.call is not kept[0].call:
            return None
        chaos.cluster.network.tampers.remove(tamper)
        chaos.cluster.note("swap two cache updates")
        return [packet, kept[0]]

    chaos.cluster.network.tampers.append(tamper)


async def garble_update(chaos: Chaos) -> None:
    """A byte of it is another one: mostly of a key, or of the checksum."""

    def tamper(packet: Packet) -> list[Packet] | None:
        if not _is_about_the_cache(packet) or packet.to_server:
            return None
        update = pb.SessionResponse.FromString(packet.data)
        if not update.cache.stored:
            return None
        data = bytearray(update.cache.stored)
        data[chaos.rng.randrange(len(data))] ^= 1 << chaos.rng.randrange(8)
        update.cache.stored = bytes(data)
        chaos.cluster.note("garble a cache update")
        return [_with(packet, update.SerializeToString())]

    _arm(chaos, tamper)


def _command(packet: Packet) -> object:
    return command_from_proto(pb.SessionRequest.FromString(packet.data))


async def kill_sender_in_push(chaos: Chaos) -> None:
    _kill_at(
        chaos,
        "kill a prefill worker in mid-push",
        lambda one: _is_frame(one, KvBlocks),
        sender=True,
    )


async def kill_receiver_in_push(chaos: Chaos) -> None:
    _kill_at(
        chaos,
        "kill a decode worker in mid-push",
        lambda one: _is_frame(one, KvBlocks),
        sender=False,
    )


async def kill_receiver_at_commit(chaos: Chaos) -> None:
    def receipt(packet: Packet) -> bool:
        return packet.call.method == "Push" and packet.kind == "status"

    _kill_at(chaos, "kill a decode worker as it commits", receipt, sender=False)


async def freeze_in_push(chaos: Chaos) -> None:
    """One end of a hand-off stands still, and perhaps the router too, so that nobody renews the
    lease.
    """
    sender, with_router = chaos.rng.random() < 0.6, chaos.rng.random() < 0.5
    skip = chaos.rng.randrange(3)

    def tamper(packet: Packet) -> list[Packet] | None:
        nonlocal skip
        if not _is_frame(packet, KvOpen, KvBlocks, KvCommit) or packet.call._connection is None:
            return None
        skip -= 1
        if skip >= 0:
            return None
        connection, cluster = packet.call._connection, chaos.cluster
        frozen = [connection.client if sender else connection.server]
        if with_router and cluster.router is not None and cluster.router.process.alive:
            frozen.append(cluster.router.process)
        for process in frozen:
            if process.frozen_since is None:
                seconds = (
                    chaos.rng.uniform(0.2, 6.0)
                    if process is frozen[0]
                    else chaos.rng.uniform(1.0, 4.0)
                )
                router = process is not frozen[0]
                cluster.note(
                    "freeze an end of a push", seconds, loses_worker=not router, stops_router=router
                )
                cluster.network.freeze(process)
                chaos.later(seconds, process.thaw)
        return [packet]

    _arm(chaos, tamper)


async def kill_at_token(chaos: Chaos) -> None:
    skip = chaos.rng.randrange(12)

    def event(packet: Packet) -> bool:
        nonlocal skip
        session = packet.call.method == "Session" and not packet.to_server
        if session and packet.kind == "message" and not packet.data.startswith(CACHE_UPDATE):
            skip -= 1
        return skip < 0 and session

    _kill_at(chaos, "kill a worker at a token", event, sender=False)


def _kill_at(chaos: Chaos, kind: str, moment: Callable[[Packet], bool], *, sender: bool) -> None:
    def tamper(packet: Packet) -> list[Packet] | None:
        connection = packet.call._connection
        if connection is None or not moment(packet):
            return None
        name = (connection.client if sender else connection.server).name
        if name not in chaos.cluster.members:
            return None
        # At once, or when the packet has arrived
        delay = chaos.rng.choice((0.0, 0.0, 0.001, 0.01))
        chaos.later(delay, chaos.kill, chaos.cluster.members[name], kind)
        return [packet]

    _arm(chaos, tamper)
