"""What this machine can move at most: memory to memory by one core, and over one loopback connection by two."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np

from kvrelay.child import bound_to_parent
from kvrelay.errors import Unavailable

_BYTES = 256 * 2**20
_WRITE_BYTES = 2**20
_TRIES = 5
_WITHIN_S = 30.0

_DRAIN = f"""
import os, socket, sys
os.sched_setaffinity(0, {{int(sys.argv[2])}})
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
memory = memoryview(bytearray({_BYTES}))
while True:
    at = 0
    while at < {_BYTES}:
        received = connection.recv_into(memory[at : at + {_WRITE_BYTES}])
        if not received:
            sys.exit()
        at += received
    connection.sendall(b"1")
"""


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Bytes per second."""

    memcpy: float
    loopback: float

    def best(self, other: WireLimits) -> WireLimits:
        return WireLimits(max(self.memcpy, other.memcpy), max(self.loopback, other.loopback))


def measure_wire_limits(cores: tuple[int, int]) -> WireLimits:
    """The best of some tries each. Binds the thread that calls it to the first core meanwhile."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cores[0]})
    try:
        return WireLimits(_memcpy(), _loopback(cores[1]))
    finally:
        os.sched_setaffinity(0, allowed)


def _memcpy() -> float:
    source, target = np.ones(_BYTES, dtype=np.uint8), np.zeros(_BYTES, dtype=np.uint8)
    best = float("inf")
    for _ in range(_TRIES):
        started = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - started)
    return _BYTES / best


def _loopback(core: int) -> float:
    """From memory to memory: blocking writes from one large buffer, whose other end reads into another."""
    data = np.ones(_BYTES, dtype=np.uint8).data
    best = float("inf")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_WITHIN_S)
        port = listener.getsockname()[1]
        with subprocess.Popen(bound_to_parent(sys.executable, "-c", _DRAIN, str(port), str(core))):
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise Unavailable("the reading end of the loopback connection did not start") from None
            with connection:
                connection.settimeout(_WITHIN_S)
                for _ in range(_TRIES):
                    started = time.perf_counter()
                    for at in range(0, _BYTES, _WRITE_BYTES):
                        connection.sendall(data[at : at + _WRITE_BYTES])
                    connection.recv(1)
                    best = min(best, time.perf_counter() - started)
    return _BYTES / best
