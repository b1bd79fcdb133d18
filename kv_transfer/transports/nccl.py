"""Process groups for KV on GPUs. The two ranks must be on different GPUs."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from kv_transfer.transports.interface import interface_of
from kvrelay.errors import Unimplemented


def make_group(store: c10d.Store, rank: int, host: str, timeout: timedelta) -> Any:
    """Makes a group of two ranks and waits for the other rank. NCCL uses the interface of `host`
    unless NCCL_SOCKET_IFNAME names another.

    Raises Unimplemented without NCCL, and Unavailable if no interface has the address.
    """
    if not c10d.is_nccl_available():
        raise Unimplemented(
            "transport nccl needs a build of torch with NCCL; set transfer.transport to gloo "
            "or grpc"
        )
    # Without this setting a wait does not block, and a watchdog ends the process if a peer is lost.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    # NCCL reads this when the process makes its first group.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(host)}")
    # The type stub lacks the point-to-point calls.
    nccl: Any = c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    group = nccl(store, rank, 2, options)
    # The first message connects and waits for the other rank. It is sent here, so that no push
    # waits for it later.
    greeting = torch.zeros(1, dtype=torch.uint8, device="cuda")
    (group.send if rank == 0 else group.recv)([greeting], 1 - rank, 0).wait(timeout)
    return group
