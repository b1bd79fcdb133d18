"""What a disk, a memory and a loopback connection do by themselves, in bytes per second."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import numpy as np

# Pieces of a measurement.
PIECES = 256


def disk_rates(folder: Path, size: int) -> dict[str, float]:
    """Bytes per second of the disk for files of `size` bytes: written as a tier does, written with
    a flush to the disk, and read from the kernel's cache.
    """
    data = os.urandom(size)
    rates = {}
    for name, flush in (("write", False), ("write_flushed", True), ("read_cached", None)):
        began = time.perf_counter()
        for number in range(PIECES):
            path = folder / str(number)
            if flush is None:
                path.read_bytes()
                continue
            with path.open("wb") as file:
                file.write(data)
                if flush:
                    file.flush()
                    os.fsync(file.fileno())
        rates[name] = PIECES * size / (time.perf_counter() - began)
    return rates


def memory_rate(size: int) -> float:
    """Bytes per second that one thread copies in pieces of `size` bytes, between memories that do
    not fit into caches.
    """
    source = np.ones((PIECES, size), np.uint8)
    # Written once before, since the first write to a page takes longer.
    target = np.full((PIECES, size), 2, np.uint8)
    began = time.perf_counter()
    for number in range(PIECES):
        target[number] = source[number]
    return PIECES * size / (time.perf_counter() - began)


def loopback_rate(size: int) -> float:
    """Bytes per second that a TCP connection of this machine takes in pieces of `size` bytes, from
    one thread to another.
    """
    total = PIECES * size
    with socket.create_server(("127.0.0.1", 0)) as server:

        def receive() -> None:
            connection, _ = server.accept()
            with connection:
                buffer, left = bytearray(2**20), total
                while left:
                    left -= connection.recv_into(buffer)

        thread = threading.Thread(target=receive)
        thread.start()
        piece = os.urandom(size)
        with socket.create_connection(server.getsockname()) as sender:
            began = time.perf_counter()
            for _ in range(PIECES):
                sender.sendall(piece)
            thread.join()
    return total / (time.perf_counter() - began)
