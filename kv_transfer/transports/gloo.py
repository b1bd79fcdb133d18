"""Process groups for KV in host memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import ProcessGroupGloo, Store


def make_group(store: Store, rank: int, host: str, timeout: timedelta) -> Any:
    """Makes a group of two ranks. Waits for the other rank; listens on `host` only."""
    # The type stub lacks the options.
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timeout
    return gloo(store, rank, 2, options)
