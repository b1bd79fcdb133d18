"""Finds the network interface of an address, since NCCL takes an interface name instead of an
address.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
from pathlib import Path

from kvrelay.errors import Unavailable

_SIOCGIFADDR = 0x8915  # linux/sockios.h: an interface's IPv4 address
_IFREQ_BYTES = 40
# A struct ifreq has 16 bytes of name, then a sockaddr_in that begins with family and port.
_ADDRESS = slice(20, 24)


def interface_of(host: str) -> str:
    """The interface that has an address of this machine: `localhost` or an IP address, with or
    without brackets. Raises Unavailable.
    """
    address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    found = _having_v6(address) if address.version == 6 else _having_v4(address)
    if not found:
        raise Unavailable(f"no network interface of this machine has the address {host}")
    return found


def _having_v4(address: ipaddress.IPv4Address) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(
                    asking, _SIOCGIFADDR, name.encode().ljust(_IFREQ_BYTES, bytes(1))
                )
            # The interface has no IPv4 address.
            except OSError:
                continue
            if answer[_ADDRESS] == address.packed:
                return name
    return ""


def _having_v6(address: ipaddress.IPv6Address) -> str:
    # Absent without IPv6.
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        number, *_, name = line.split()
        if bytes.fromhex(number) == address.packed:
            return name
    return ""
