"""The autoscaling policy: a file of its own beside the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvrelay.config.section import MAX_POOL, BadValue, FilePath, Section
from kvrelay.types.workers import POOLS, PoolName

MetricName = Literal[
    "queue_depth", "queue_tokens", "queue_wait_p95_ms", "kv_occupancy", "ttft_p95_ms", "itl_p95_ms"
]
# What slo needs, by pool.
LATENCIES: dict[PoolName, str] = {"prefill": "ttft_ms", "decode": "itl_ms"}
# Metrics that are known while a pool has no worker.
_QUEUES = ("queue_depth", "queue_tokens")
# In seconds. The upper bound is the one of the Kubernetes HPA's stabilisation windows. Workers
# report their load twice a second, so a shorter interval sees nothing new.
Delay = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
Interval = Annotated[float, Field(ge=0.1, le=3600, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Step = Annotated[int, Field(gt=0, le=MAX_POOL, strict=True)]


class MetricTarget(Section):
    """One autoscaling metric and its target value; for `slo`, the latencies that 90% of the
    requests must keep. `slo` gives the pool the size for the requests that are expected by the time
    that a new worker serves.
    """

    name: Literal[MetricName, "slo"]
    target: Positive | None = None
    # slo of the prefill pool.
    ttft_ms: Positive | None = None
    # slo of the decode pool.
    itl_ms: Positive | None = None

    @model_validator(mode="after")
    def _fits_its_name(self) -> MetricTarget:
        if self.name != "slo":
            if self.target is None:
                raise ValueError(f"{self.name} needs a target; add target: NUMBER")
            wrong = next((key for key in LATENCIES.values() if getattr(self, key)), None)
        else:
            wrong = None if self.target is None else "target"
        if wrong is not None:
            needs = "ttft_ms or itl_ms" if self.name == "slo" else "target"
            raise BadValue(f"has no meaning for {self.name}; use {needs}", (wrong,))
        return self


class PoolPolicy(Section):
    """The autoscaling policy of one pool. Delays are in seconds."""

    min_replicas: Annotated[int, Field(ge=0, le=MAX_POOL, strict=True)] = 1
    max_replicas: Annotated[int, Field(gt=0, le=MAX_POOL, strict=True)] = 1
    metrics: tuple[MetricTarget, ...] = ()
    upscale_delay_s: Delay = 5.0
    downscale_delay_s: Delay = 30.0
    max_step_up: Step = 2
    max_step_down: Step = 1
    tolerance: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.1

    @model_validator(mode="after")
    def _ordered(self) -> PoolPolicy:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}; set "
                "min_replicas to max_replicas or less"
            )
        return self

    @model_validator(mode="after")
    def _shares_below_one(self) -> PoolPolicy:
        for index, metric in enumerate(self.metrics):
            if metric.name != "kv_occupancy" or metric.target is None:
                continue
            if metric.target * (1 + self.tolerance) >= 1:
                raise BadValue(
                    f"{metric.target:g} with tolerance {self.tolerance:g} never grows the pool, "
                    "because kv_occupancy is a share of at most 1; set a target below "
                    f"{1 / (1 + self.tolerance):.3g}",
                    ("metrics", index, "target"),
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
    # The step costs that the metric slo needs, as `kvrelay profile --json` writes them.
    profile: FilePath | None = None
    interval_s: Interval = 1.0

    @model_validator(mode="after")
    def _slo_is_possible(self) -> AutoscalingPolicy:
        for pool, key in LATENCIES.items():
            rules = self.pool(pool)
            for index, metric in enumerate(rules.metrics if rules else ()):
                if metric.name != "slo":
                    continue
                at = (pool, "metrics", index)
                if getattr(metric, key) is None:
                    raise BadValue(f"slo of the {pool} pool needs {key}; add {key}: NUMBER", at)
                if self.profile is None:
                    raise BadValue(
                        "slo needs the step costs of a worker; add profile: FILE to the policy, "
                        "with a file that `kvrelay profile --json FILE` wrote",
                        at,
                    )
        return self

    @model_validator(mode="after")
    def _empty_pools_wake(self) -> AutoscalingPolicy:
        for pool in POOLS:
            rules = self.pool(pool)
            if rules is None or rules.min_replicas:
                continue
            if not any(metric.name in _QUEUES for metric in rules.metrics):
                raise BadValue(
                    "0 needs a metric that is known while the pool is empty; add "
                    f"{' or '.join(_QUEUES)} to its metrics, or set 1 or more",
                    (pool, "min_replicas"),
                )
        return self

    @property
    def sleeps(self) -> bool:
        """Whether the decode pool may be empty. Requests then wait until it has a worker."""
        return self.decode is not None and not self.decode.min_replicas

    def pool(self, name: PoolName) -> PoolPolicy | None:
        """Returns the policy of a pool; None if the pool has no policy."""
        return self.prefill if name == "prefill" else self.decode
