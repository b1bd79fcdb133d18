"""Addresses that only processes of this machine reach."""

from __future__ import annotations

import ipaddress


def is_loopback(address: str) -> bool:
    """Whether the host of HOST:PORT is a loopback address."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
