"""Which transport a push takes, and why."""

from __future__ import annotations

import os
from pathlib import Path

from kvrelay.errors import Unimplemented

TRANSPORTS = ("memory", "shm", "grpc", "gloo", "nccl")


def host_id() -> str:
    """Equal in two processes if and only if each can see the other under /proc: same machine, same PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def choose_transport(requested: str, *, same_process: bool, same_host: bool, device: str) -> tuple[str, str]:
    """(transport, why). `device` is the sender's arena's: cpu or cuda.

    `auto` takes the one with the fewest copies. Raises Unimplemented for a transport that was asked for by name and
    cannot work between these two workers, since something else instead would hide that.
    """
    if requested == "auto":
        for name in ("memory", "shm"):
            if not _obstacle(name, same_process, same_host, device):
                return name, "same process" if name == "memory" else "same host"
        return "grpc", "another host" if not same_host else f"arena on {device}"
    if requested not in TRANSPORTS:
        raise Unimplemented(f"transport {requested!r} is not one of auto, {', '.join(TRANSPORTS)}")
    if obstacle := _obstacle(requested, same_process, same_host, device):
        raise Unimplemented(f"transport {requested} cannot work here: {obstacle}; auto chooses one that can")
    return requested, "asked for"


def _obstacle(name: str, same_process: bool, same_host: bool, device: str) -> str:
    """What keeps the transport from working, or nothing."""
    match name:
        case "memory" if not same_process:
            return "the two workers are not in one process"
        case "shm" if not same_host:
            return "the two workers are not on one host and in one PID namespace"
        case "memory" | "shm" | "gloo" if device != "cpu":
            return f"the KV lies on {device}, not in the host's memory"
        case "nccl" if device != "cuda":
            return f"the KV lies on {device}, not on a GPU"
    return ""
