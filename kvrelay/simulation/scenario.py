"""What a simulation simulates: the cluster, its workers and their failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import InvalidArgument
from kvrelay.planning.profile import Profile
from kvrelay.types.workers import POOLS, PoolName

# More workers than that are beyond a simulation in one process.
MAX_WORKERS = 10_000
# Workers of one machine. Each change of one changes the speed of all.
MAX_SHARING = 256
# KV blocks of all workers together. Each takes 32 bytes of this process, and more while it is held.
MAX_BLOCKS = 2**25


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker that is killed, and the second of the simulation at which it dies."""

    worker_id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays outside of the workers' steps, in seconds."""

    # A request from the client to the router's queue: network, validation, tokenization.
    request_s: float = 0.001
    # A message between router and worker, or from the router to the client, one way.
    message_s: float = 0.0005
    # A worker's time between two steps: scheduling and reporting.
    step_s: float = 0.0
    # From the end of a prompt until the decode worker has its KV, beyond the profile's hand-off.
    handoff_s: float = 0.0


def _no_slower() -> dict[PoolName, float]:
    return dict.fromkeys(POOLS, 1.0)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Mean time of a kind of steps in a cluster, relative to the profile."""

    # While no other worker of the machine computes.
    alone: float = 1.0
    # While another one computes steps of a kind, relative to `alone`.
    beside: Mapping[PoolName, float] = field(default_factory=_no_slower)
    # Single steps relative to the mean. Each value is equally likely, and their mean is 1.
    noise: tuple[float, ...] = (1.0,)


def as_profiled() -> dict[PoolName, StepTimes]:
    """Returns times of steps that are those of the profile."""
    return {pool: StepTimes() for pool in POOLS}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster to simulate. Raises InvalidArgument if it cannot run."""

    config: ClusterConfig
    # The profile of each worker at the start.
    pools: Mapping[PoolName, tuple[Profile, ...]]
    policy: AutoscalingPolicy | None = None
    failures: tuple[Failure, ...] = ()
    delays: Delays = field(default_factory=Delays)
    # Independent routers. Each has an equal share of the workers and of the requests.
    routers: int = 1
    # Of the one machine that all workers share. None: each worker has a machine of its own.
    cores: int | None = None
    # By the pool whose steps they are.
    times: Mapping[PoolName, StepTimes] = field(default_factory=as_profiled)

    def __post_init__(self) -> None:
        sizes = {pool: len(self.pools[pool]) for pool in POOLS}
        if not sizes["decode"]:
            raise InvalidArgument("a cluster needs a decode worker; give --decode 1 or more")
        if sum(sizes.values()) > MAX_WORKERS:
            raise InvalidArgument(
                f"{sum(sizes.values())} workers are too many; the most is {MAX_WORKERS}"
            )
        if self.config.kv.eviction is not None:
            raise InvalidArgument(
                "kv.eviction is not simulated: sequences keep all tokens; leave it out"
            )
        if self.policy is not None and self.routers > 1:
            raise InvalidArgument("--routers above 1 cannot be combined with --autoscaling")
        most = self._most_workers()
        if self.cores is not None and most > MAX_SHARING:
            raise InvalidArgument(
                f"{most} workers are too many for one machine, at the largest sizes of the pools; "
                f"with --cores, the most is {MAX_SHARING}"
            )
        if self.routers > sizes["decode"]:
            raise InvalidArgument(
                f"{self.routers} routers need a decode worker each; there are {sizes['decode']}"
            )
        if self.policy is None:
            names = {f"{pool}-{number}" for pool in POOLS for number in range(sizes[pool])}
            for one in self.failures:
                if one.worker_id not in names:
                    raise InvalidArgument(
                        f"--fail {one.worker_id}: there is no such worker; the workers are "
                        + " and ".join(_names(pool, sizes[pool]) for pool in POOLS if sizes[pool])
                    )
        blocks = 0
        for pool in POOLS:
            if self.pools[pool] and self.config.pool_kv(pool).memory == "auto":
                raise InvalidArgument(
                    f"kv.memory of the {pool} pool is auto, which depends on the machine; give the "
                    "bytes of one worker, such as 8GiB"
                )
            for profile in self.pools[pool]:
                blocks += self.num_blocks(pool, profile)
                if not self.num_blocks(pool, profile):
                    size = self.config.pool_kv(pool).block_size * profile.kv_token_bytes
                    raise InvalidArgument(
                        f"kv.memory {self.config.pool_kv(pool).memory} of a {pool} worker holds "
                        f"no block of {size} bytes; give more memory or a smaller kv.block_size"
                    )
        if blocks > MAX_BLOCKS:
            raise InvalidArgument(
                f"the workers have {blocks:,} KV blocks together; the most is {MAX_BLOCKS:,}; "
                "lower kv.memory or raise kv.block_size"
            )

    def _most_workers(self) -> int:
        """Returns the workers of both pools at their largest sizes."""
        most = 0
        for pool in POOLS:
            rules = None if self.policy is None else self.policy.pool(pool)
            most += max(len(self.pools[pool]), rules.max_replicas if rules else 0)
        return most

    @property
    def max_model_len(self) -> int:
        """The context that every worker serves, in tokens."""
        lengths = [one.max_model_len for pool in POOLS for one in self.pools[pool]]
        return min([*lengths, self.config.model.max_model_len or lengths[0]])

    @property
    def vocab_size(self) -> int:
        """The smallest vocabulary of a worker."""
        return min(one.vocab_size for pool in POOLS for one in self.pools[pool])

    def num_blocks(self, pool: PoolName, profile: Profile) -> int:
        """Returns the KV blocks of a worker."""
        kv = self.config.pool_kv(pool)
        return int(kv.memory) // (kv.block_size * profile.kv_token_bytes)

    def most_tokens(self) -> int:
        """Returns the tokens of the longest sequence that every decode worker has room for."""
        block_size = self.config.pool_kv("decode").block_size
        room = min(self.num_blocks("decode", one) for one in self.pools["decode"]) * block_size
        return min(room, self.max_model_len)

    def share(self, router: int) -> Scenario:
        """Returns the part of the cluster that belongs to one of the routers. Worker numbers of
        failures count over all routers.
        """
        if self.routers == 1:
            return self
        pools = {pool: self.pools[pool][router :: self.routers] for pool in POOLS}
        failures = []
        for one in self.failures:
            pool, _, number = one.worker_id.rpartition("-")
            if int(number) % self.routers == router:
                name = f"{pool}-{int(number) // self.routers}"
                failures.append(Failure(name, one.at_s))
        return replace(self, pools=pools, failures=tuple(failures), routers=1)


def _names(pool: PoolName, size: int) -> str:
    """Returns the names of a pool's workers, as a text for people."""
    return f"{pool}-0" if size == 1 else f"{pool}-0 to {pool}-{size - 1}"
