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
    """Called by all ranks with their own arenas, 1-D uint8 of one size. Rank 0 gets all of them,
    for as long as their processes live; the others get their own.
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
    # On the host, as all that ranks tell each other beside the model
    torch.distributed.all_gather(heard, told)
    if rank:
        return (buffer,)
    return (
        buffer,
        *(_open(one.numpy().tobytes().rstrip(b"\0"), buffer.numel()) for one in heard[1:]),
    )


def _describe(buffer: torch.Tensor) -> bytes:
    """What torch's own multiprocessing sends of a tensor on a GPU."""
    storage: Any = buffer.untyped_storage()
    parts = storage._share_cuda_()
    return json.dumps([part.hex() if isinstance(part, bytes) else part for part in parts]).encode()


def _open(description: bytes, size: int) -> torch.Tensor:
    """The tensor that another rank described; raises RuntimeError if the two GPUs cannot reach each
    other.
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
