"""What a worker process is started with. Free of torch: whoever starts workers needs no model."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.config.schema import ClusterConfig
from kvrelay.types import Claim, PoolName


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    worker_id: str
    pool: PoolName
    model_path: str
    redis_url: str
    config: ClusterConfig
    # The engine takes cores for itself: where nobody else decides what runs where
    pin: bool = False
    standby: bool = False  # serves in no pool until it is told which
    last_epoch: int = 0  # that it had in another pool, before it changed over
    claim: Claim | None = None  # under which a controller starts it
