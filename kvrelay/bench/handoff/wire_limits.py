"""Transfer limits of this machine: memory to memory with one core, and over one loopback connection
with two cores.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from kvrelay.errors import Unavailable
from kvrelay.process.child import bound_to_parent

_BYTES = 256 * 2**20
_WRITE_BYTES = 2**20
_TRIES = 5
_CONNECTIONS = 4
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
    """Bytes per second of each pass, in the order of the passes."""

    memcpy_passes: tuple[float, ...]
    loopback_passes: tuple[float, ...]

    @property
    def memcpy(self) -> float:
        """Median rate from memory to memory, in bytes per second."""
        return median(self.memcpy_passes)

    @property
    def loopback(self) -> float:
        """Median rate over one loopback connection, in bytes per second."""
        return median(self.loopback_passes)

    def joined(self, other: WireLimits) -> WireLimits:
        """Returns the passes of both measurements."""
        return WireLimits(
            self.memcpy_passes + other.memcpy_passes, self.loopback_passes + other.loopback_passes
        )


def measure_wire_limits(cores: tuple[int, int]) -> WireLimits:
    """Measures several passes of each limit, over several connections. Binds the calling thread to
    the first core during the measurement.
    """
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cores[0]})
    try:
        loopback = [rate for _ in range(_CONNECTIONS) for rate in _loopback(cores[1])]
        return WireLimits(tuple(_memcpy()), tuple(loopback))
    finally:
        os.sched_setaffinity(0, allowed)


def _memcpy() -> list[float]:
    source, target = np.ones(_BYTES, dtype=np.uint8), np.zeros(_BYTES, dtype=np.uint8)
    rates = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        np.copyto(target, source)
        rates.append(_BYTES / (time.perf_counter() - started))
    return rates


def _loopback(core: int) -> list[float]:
    """Measures one loopback connection from memory to memory. The sender makes blocking writes from
    one large buffer; the other end reads into another buffer.

    The first pass does not count, because the buffers of the connection grow during it.
    """
    data = np.ones(_BYTES, dtype=np.uint8).data
    rates = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_WITHIN_S)
        port = listener.getsockname()[1]
        with subprocess.Popen(bound_to_parent(sys.executable, "-c", _DRAIN, str(port), str(core))):
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                raise Unavailable("the receiver of the loopback connection did not start") from None
            with connection:
                connection.settimeout(_WITHIN_S)
                for _ in range(1 + _TRIES):
                    started = time.perf_counter()
                    for at in range(0, _BYTES, _WRITE_BYTES):
                        connection.sendall(data[at : at + _WRITE_BYTES])
                    connection.recv(1)
                    rates.append(_BYTES / (time.perf_counter() - started))
    return rates[1:]
