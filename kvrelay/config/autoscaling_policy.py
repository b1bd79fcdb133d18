"""The autoscaling policy: a file of its own beside the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvrelay.config.section import MAX_POOL, PositiveInt, Seconds, Section
from kvrelay.types.workers import PoolName

MetricName = Literal[
    "queue_depth", "queue_tokens", "queue_wait_p95_ms", "kv_occupancy", "ttft_p95_ms", "itl_p95_ms"
]


class MetricTarget(Section):
    """One autoscaling metric and its target value."""

    name: MetricName
    target: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PoolPolicy(Section):
    """The autoscaling policy of one pool. Delays are in seconds."""

    min_replicas: Annotated[int, Field(ge=0, le=MAX_POOL, strict=True)] = 1
    max_replicas: Annotated[int, Field(gt=0, le=MAX_POOL, strict=True)] = 1
    metrics: tuple[MetricTarget, ...] = ()
    upscale_delay_s: Seconds = 5.0
    downscale_delay_s: Seconds = 30.0
    max_step_up: PositiveInt = 2
    max_step_down: PositiveInt = 1
    tolerance: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.1

    @model_validator(mode="after")
    def _ordered(self) -> PoolPolicy:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}; set "
                "min_replicas to max_replicas or less"
            )
        return self


class AutoscalingPolicy(Section):
    """One policy per pool. A pool without a policy keeps its configured size."""

    prefill: PoolPolicy | None = None
    decode: PoolPolicy | None = None
    # Workers move from a pool with a worker to spare to a pool that grows.
    rebalance: bool = False
    # Loaded workers without a pool. They replace dead workers.
    standby: Annotated[int, Field(ge=0, le=64, strict=True)] = 0
    interval_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    def pool(self, name: PoolName) -> PoolPolicy | None:
        """Returns the policy of a pool; None if the pool has no policy."""
        return self.prefill if name == "prefill" else self.decode
