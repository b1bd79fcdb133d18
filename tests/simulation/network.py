"""A network between the processes of a simulation, with gRPC's promises and none besides.

A connection delivers in order, or breaks; what was under way is lost then. A cut is a silence:
packets wait, as TCP repeats them, until it heals or one side's keepalive gives up. A killed process
resets its connections; a frozen one is silent.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

import xxhash
from simulation.virtual_loop import Process, VirtualLoop

if TYPE_CHECKING:
    from simulation.channel import ClientCall
    from simulation.server import Server, ServerCall

# Router.runtime.sessions.CHANNEL_OPTIONS: 2 s between pings, 2 s for an answer
CLIENT_KEEPALIVE_S = 4.0
SERVER_KEEPALIVE_S = 10.0  # kvrelay.worker.runtime.grpc_server: 5 s and 5 s

# What messages tell of that counts as a fault
SIGHTINGS = {b"the lease ended before": "a lease expired"}

Tamper = Callable[["Packet"], "list[Packet] | None"]
"""Given each packet as it is sent. What is to be sent in its place, or None: leave it."""


class Packet:
    """Part of one call. `kind`: open, message, half_close, cancel; headers, message, status."""

    __slots__ = ("call", "data", "kind", "to_server")

    def __init__(self, call: ClientCall, to_server: bool, kind: str, data: Any = None) -> None:
        self.call = call
        self.to_server = to_server
        self.kind = kind
        self.data = data


class Network:
    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.servers: dict[str, Server] = {}  # by address
        self.connections: list[Connection] = []
        self.faults: Counter[str] = Counter()
        self.tampers: list[Tamper] = []
        self.unexpected: list[str] = []  # errors that a handler let through
        self.calls = 0  # that were ever begun
        self.trace = xxhash.xxh3_64()
        self.history: Callable[[str], None] | None = None
        self.rng = rng
        self.slow: dict[frozenset[str], float] = {}  # seconds that a pair's packets take besides
        self._cuts: set[tuple[str, str]] = set()
        self._silent_since: dict[frozenset[str], float] = {}
        self._promised: set[int] = set()  # ports of servers that have not started

    def free_port(self) -> int:
        """The lowest: a port is used again as soon as its server is gone, by whoever comes next."""
        taken = {address.rpartition(":")[2] for address in self.servers}
        return next(
            port for port in count(20001) if str(port) not in taken and port not in self._promised
        )

    def promise(self, port: int) -> None:
        self._promised.add(port)

    def keep_promise(self, port: int) -> None:
        self._promised.discard(port)

    def say(self, text: str) -> None:
        """Into the trace, and the history if one is kept."""
        line = f"{self.loop.time():.6f} {text}"
        self.trace.update(line.encode())
        if self.history is not None:
            self.history(line)

    # Links

    def latency(self, source: str, target: str) -> float:
        rng = self.rng
        base = rng.uniform(0.0001, 0.002) if rng.random() < 0.95 else rng.uniform(0.002, 0.06)
        return base + self.slow.get(frozenset((source, target)), 0.0)

    def cut(self, source: str, target: str) -> None:
        """Nothing gets from source to target any more."""
        self._cuts.add((source, target))
        self.silence({source, target})

    def heal(self, source: str, target: str) -> None:
        self._cuts.discard((source, target))
        for connection in list(self.connections):
            connection.flush()

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self._cuts

    def silence(self, names: set[str]) -> None:
        """A cut or a freeze begins: keepalives between these, or between one and all, may end
        connections.
        """
        for connection in list(self.connections):
            pair = {connection.client.name, connection.server.name}
            if names == pair or (len(names) == 1 and names < pair):
                connection.watch()

    # Processes

    def freeze(self, process: Process) -> None:
        process.freeze()
        self.silence({process.name})

    def killed(self, process: Process) -> None:
        """After Process.kill: its kernel resets what it had."""
        for address in [one for one, server in self.servers.items() if server.process is process]:
            del self.servers[address]
        for connection in list(self.connections):
            if process in (connection.client, connection.server):
                connection.reset_by(process)


class Connection:
    """From one channel to one server's process."""

    def __init__(self, network: Network, client: Process, server: Server) -> None:
        self.network = network
        self.client = client
        self.server = server.process
        self.listener = server
        self.open = {client.name: True, server.process.name: True}
        self.calls: list[ClientCall] = []
        self.server_calls: dict[ClientCall, ServerCall] = {}
        # When the last packet of a direction arrives, by to_server
        self._due = {True: 0.0, False: 0.0}
        self._held: dict[bool, deque[Packet | None]] = {True: deque(), False: deque()}  # by a cut
        network.connections.append(self)
        if self._silent:
            self.watch()

    @property
    def usable(self) -> bool:
        return self.open[self.client.name]

    def send(self, packet: Packet) -> None:
        sender = self.client if packet.to_server else self.server
        if not self.open[sender.name]:
            return
        for tamper in list(self.network.tampers):
            changed = tamper(packet)
            if changed is not None:
                for one in changed:
                    self._transmit(one.to_server, one)
                return
        self._transmit(packet.to_server, packet)

    def _transmit(self, to_server: bool, packet: Packet | None) -> None:
        """None: a reset."""
        source, target = (self.client, self.server) if to_server else (self.server, self.client)
        network = self.network
        if network.is_cut(source.name, target.name):
            self._held[to_server].append(packet)
            return
        arrival = max(
            network.loop.time() + network.latency(source.name, target.name),
            self._due[to_server] + 1e-6,
        )
        self._due[to_server] = arrival
        network.loop.call_at(arrival, self._arrive, to_server, packet, context=target.context)

    def flush(self) -> None:
        for to_server, held in self._held.items():
            source, target = (self.client, self.server) if to_server else (self.server, self.client)
            if held and not self.network.is_cut(source.name, target.name):
                packets = list(held)
                held.clear()
                for packet in packets:
                    self._transmit(to_server, packet)

    def _arrive(self, to_server: bool, packet: Packet | None) -> None:
        target = self.server if to_server else self.client
        if not self.open[target.name]:
            return
        if packet is None:
            self._close(target, "Connection reset by peer")
            return
        network = self.network
        for text, sighting in SIGHTINGS.items():
            if isinstance(packet.data, bytes) and text in packet.data:
                network.faults[sighting] += 1
        network.say(
            f"{'>' if to_server else '<'} {self.client.name} {self.server.name} {_shown(packet)}"
        )
        if to_server:
            self.listener.arrived(self, packet)
        else:
            packet.call.arrived(packet)

    # Ends

    def break_side(self, process: Process, reason: str) -> None:
        """That side gives the connection up and resets it."""
        if self.open[process.name]:
            self._transmit(process is self.client, None)
            self._close(process, reason)

    def reset_by(self, dead: Process) -> None:
        other = self.server if dead is self.client else self.client
        if self.open[dead.name]:
            self.open[dead.name] = False
            if other.alive:
                self._transmit(dead is self.client, None)
                self.watch()

    def _close(self, process: Process, reason: str) -> None:
        self.open[process.name] = False
        if process is self.client:
            for call in list(self.calls):
                call.broken(reason)
        else:
            for one in list(self.server_calls.values()):
                one.cancel()
        if not any(self.open.values()) and self in self.network.connections:
            self.network.connections.remove(self)

    # Keepalive

    @property
    def _silent(self) -> bool:
        network, client, server = self.network, self.client, self.server
        return (
            network.is_cut(client.name, server.name)
            or network.is_cut(server.name, client.name)
            or any(one.frozen_since is not None or not one.alive for one in (client, server))
        )

    def watch(self) -> None:
        for process, timeout_s in (
            (self.client, CLIENT_KEEPALIVE_S),
            (self.server, SERVER_KEEPALIVE_S),
        ):
            if self.open[process.name]:
                process.soon(timeout_s, self._check, process)

    def _check(self, process: Process) -> None:
        """A silence that has an end between two looks may be missed, as a ping can be."""
        if self.open[process.name] and self._silent:
            self.network.faults["keepalive ended a connection"] += 1
            self.break_side(process, "keepalive watchdog timeout")


def _shown(packet: Packet) -> str:
    data = packet.data
    text = (
        f"{len(data)} bytes {xxhash.xxh3_64_hexdigest(data)}"
        if isinstance(data, bytes)
        else repr(data)
    )
    return f"{packet.call.method} #{packet.call.number} {packet.kind} {text}"
