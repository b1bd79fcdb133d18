"""Process groups for KV on GPUs. The two ranks must be on different ones."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from kv_transfer.transports.interface import interface_of
from kvrelay.errors import Unimplemented


def make_group(store: c10d.Store, rank: int, host: str, timeout: timedelta) -> Any:
    """Waits for the other rank of two. NCCL takes the interface of `host`, unless
    NCCL_SOCKET_IFNAME names another.
    """
    if not c10d.is_nccl_available():
        raise Unimplemented("transport nccl needs a build of torch with NCCL; use gloo or grpc")
    # Otherwise a wait does not block, and a watchdog ends the process when a peer is lost.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    # Read when the process's first group is made
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(host)}")
    nccl: Any = c10d.ProcessGroupNCCL  # whose type stub lacks the point-to-point calls
    options = nccl.Options()
    options._timeout = timeout
    group = nccl(store, rank, 2, options)
    # The first message connects, and waits for the other rank: now, not in the middle of a push.
    greeting = torch.zeros(1, dtype=torch.uint8, device="cuda")
    (group.send if rank == 0 else group.recv)([greeting], 1 - rank, 0).wait(timeout)
    return group
