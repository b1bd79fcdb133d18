"""KV arenas of ranks on GPUs, mapped into rank 0's process by CUDA IPC. It needs two GPUs and has
not run yet.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed

_DESCRIPTION_BYTES = 2048


def exchange(buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Collects the ranks' arenas, 1-D uint8 of one size, on rank 0. All ranks call it with their
    own arena.

    Rank 0 gets all arenas, valid as long as the other processes live. The other ranks get their
    own.
    """
    rank = torch.distributed.get_rank()
    told = torch.zeros(_DESCRIPTION_BYTES, dtype=torch.uint8)
    if rank:
        text = _describe(buffer)
        assert len(text) <= _DESCRIPTION_BYTES, (
            "torch has begun to describe storages at greater length"
        )
        told[: len(text)] = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
    heard = [torch.empty_like(told) for _ in range(torch.distributed.get_world_size())]
    # On the host, like all messages between ranks outside the model.
    torch.distributed.all_gather(heard, told)
    if rank:
        return (buffer,)
    return (
        buffer,
        *(_open(text.numpy().tobytes().rstrip(b"\0"), buffer.numel()) for text in heard[1:]),
    )


def _describe(buffer: torch.Tensor) -> bytes:
    """The description that torch's own multiprocessing sends for a tensor on a GPU."""
    storage: Any = buffer.untyped_storage()
    parts = storage._share_cuda_()
    return json.dumps([part.hex() if isinstance(part, bytes) else part for part in parts]).encode()


def _open(description: bytes, size: int) -> torch.Tensor:
    """Maps the tensor that another rank described. Raises RuntimeError if the two GPUs cannot
    access each other.
    """
    device, handle, num_bytes, offset, counter, counter_offset, event, wait = json.loads(
        description
    )
    torch.cuda.init()  # type: ignore[no-untyped-call]
    new_shared: Any = torch.UntypedStorage._new_shared_cuda
    storage = new_shared(
        device,
        bytes.fromhex(handle),
        num_bytes,
        offset,
        bytes.fromhex(counter),
        counter_offset,
        bytes.fromhex(event),
        wait,
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:size]
