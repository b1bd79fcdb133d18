"""Rendezvous of the ranks, and int64 messages from rank 0 to the others by torch.distributed, on
loopback only.
"""

from __future__ import annotations

import os
from datetime import timedelta

import numpy as np
import torch
import torch.distributed

from kvrelay.engine.parallel.step_message import Numbers

# Numbers per message; most steps fit into one.
_PACKET = 1024
# Time for the other ranks to import their modules.
_MEET = timedelta(minutes=10)
# An idle rank waits for the next step without a timeout. Rank 0's watch detects a hanging step.
_FOREVER = timedelta(days=3650)


def join(
    rank: int, degree: int, port: int, device: str, *, listening_fd: int | None = None
) -> None:
    """Joins the process group and waits for all ranks. `port` is that of rank 0's store; rank 0
    passes the listening socket as `listening_fd`.
    """
    # All ranks are on one node. NCCL needs sockets only for the rendezvous.
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
    """Sends 1-D int64 numbers to all other ranks. Returns when they have been handed over, which
    may be before they arrive.
    """
    packet = np.zeros(max(_PACKET, len(numbers) + 1), dtype=np.int64)
    packet[0] = len(numbers)
    packet[1 : len(numbers) + 1] = numbers
    torch.distributed.broadcast(torch.from_numpy(packet[:_PACKET]), src=0)
    if len(packet) > _PACKET:
        torch.distributed.broadcast(torch.from_numpy(packet[_PACKET:]), src=0)


def hear() -> Numbers:
    """Receives the next numbers from rank 0, 1-D int64. Waits without a timeout."""
    packet = torch.empty(_PACKET, dtype=torch.int64)
    torch.distributed.broadcast(packet, src=0)
    length = int(packet[0])
    if length >= _PACKET:
        rest = torch.empty(length + 1 - _PACKET, dtype=torch.int64)
        torch.distributed.broadcast(rest, src=0)
        packet = torch.cat((packet, rest))
    return packet[1 : length + 1].numpy()
