"""Where this process can be reached by TCP."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

_LISTEN = "0A"


def listening() -> set[tuple[str, int]]:
    """Addresses and ports of the sockets of this process that listen."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(fd))
        except OSError:  # it was the listing's own
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == _LISTEN and f"socket:[{inode}]" in inodes:
                host, _, port = address.partition(":")
                found.add((_address(host), int(port, 16)))
    return found


def _address(text: str) -> str:
    """From the kernel's 32-bit words, each in the machine's own order. IPv4's are IPv4's on a
    socket for both, too.
    """
    words = b"".join(
        struct.pack("=I", int(text[start : start + 8], 16)) for start in range(0, len(text), 8)
    )
    return socket.inet_ntop(
        socket.AF_INET if len(words) == 4 else socket.AF_INET6, words
    ).removeprefix("::ffff:")
