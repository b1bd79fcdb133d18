"""How ranks meet, and how rank 0 tells the others: tensors of numbers over torch.distributed, on
loopback only.
"""

from __future__ import annotations

import os
from datetime import timedelta

import numpy as np
import torch
import torch.distributed

from kvrelay.engine.parallel.step_message import Numbers

_PACKET = 1024  # numbers that go at once; most steps are no longer
_MEET = timedelta(minutes=10)  # for the others to have imported what they need
# An idle rank waits for the next step; who hangs in one is noticed by rank 0's watch
_FOREVER = timedelta(days=3650)


def join(
    rank: int, degree: int, port: int, device: str, *, listening_fd: int | None = None
) -> None:
    """Waits for all ranks. `port` is that of rank 0's store, behind `listening_fd` there."""
    # Ranks are of one node; NCCL needs sockets only to find the others
    for backend in ("GLOO", "NCCL"):
        os.environ[f"{backend}_SOCKET_IFNAME"] = "lo"
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        port,
        is_master=listening_fd is not None,
        master_listen_fd=listening_fd,
        wait_for_workers=False,
        timeout=_MEET,
    )
    torch.distributed.init_process_group(
        # Numbers stay on the host: gloo carries them beside NCCL.
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=degree,
        timeout=_FOREVER,
    )


def tell(numbers: Numbers) -> None:
    """To all other ranks; returns when they have been handed over, not when they have come."""
    packet = np.zeros(max(_PACKET, len(numbers) + 1), dtype=np.int64)
    packet[0] = len(numbers)
    packet[1 : len(numbers) + 1] = numbers
    torch.distributed.broadcast(torch.from_numpy(packet[:_PACKET]), src=0)
    if len(packet) > _PACKET:
        torch.distributed.broadcast(torch.from_numpy(packet[_PACKET:]), src=0)


def hear() -> Numbers:
    """What rank 0 tells; waits for it without end."""
    packet = torch.empty(_PACKET, dtype=torch.int64)
    torch.distributed.broadcast(packet, src=0)
    length = int(packet[0])
    if length >= _PACKET:
        rest = torch.empty(length + 1 - _PACKET, dtype=torch.int64)
        torch.distributed.broadcast(rest, src=0)
        packet = torch.cat((packet, rest))
    return packet[1 : length + 1].numpy()
