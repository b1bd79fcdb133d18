"""Settings of a worker process. Does not import torch, which a process that starts workers does not
need.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.config.schema import ClusterConfig
from kvrelay.types.control_plane import Claim
from kvrelay.types.workers import PoolName


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings that a worker process is started with."""

    worker_id: str
    pool: PoolName
    model_path: str
    redis_url: str
    config: ClusterConfig
    # The engine reserves cores. For hosts without another scheduler of cores.
    pin: bool = False
    # Serves in no pool until it is assigned one.
    standby: bool = False
    # The epoch that the worker had in another pool, before a pool switch.
    last_epoch: int = 0
    # The claim under which a controller starts the worker.
    claim: Claim | None = None
