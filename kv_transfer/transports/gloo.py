"""Process groups for KV in the host's memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import ProcessGroupGloo, Store


def make_group(store: Store, rank: int, host: str, timeout: timedelta) -> Any:
    """Waits for the other rank of two; listens on `host` only."""
    gloo: Any = ProcessGroupGloo  # whose type stub lacks the options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    return gloo(store, rank, 2, options)
