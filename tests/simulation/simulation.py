"""One seed, one history: a cluster, its clients and what happens to them, judged."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import structlog
from simulation.chaos import Chaos
from simulation.clients import Client, plan_requests
from simulation.cluster import Cluster
from simulation.collisions import plan_beginnings
from simulation.faults import FAULTS
from simulation.history import judge, judge_acts, judge_incarnations, judge_leaders
from simulation.toy_engine import BLOCK
from simulation.virtual_loop import _PROCESS

from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.config.schema import ClusterConfig

HASH_BITS = 16
MAX_ATTEMPTS = 8
LEASE_S = 2.0
READY_S = 20.0  # that the first workers may take, once a controller leads
CHECK_S = 0.1  # between two looks into the books
SETTLE_S = 14.0  # in which all blocks must be back: the longest keepalive, a sender's timeout


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    trace: str
    complaints: tuple[str, ...]
    faults: Counter[str]
    outcomes: Counter[str]
    steps: int
    virtual_s: float
    settled_s: float  # after the last answer


class Simulation:
    """With few `hash_bits`, some prompts have block hashes of others."""

    def __init__(
        self,
        seed: int,
        history: Callable[[str], None] | None = None,
        also: Sequence[str] = (),
        *,
        hash_bits: int = HASH_BITS,
    ) -> None:
        """`also`: names of faults that happen besides those that are drawn."""
        self.seed = seed
        rng = random.Random(seed)
        self.cluster = Cluster(
            random.Random(rng.random()),
            _config(rng),
            _policy(rebalance=rng.random() < 0.5, standby=random.Random(seed).randint(0, 1)),
            num_blocks={"prefill": rng.choice((24, 64)), "decode": rng.choice((20, 28, 64))},
            sizes={"prefill": rng.choice((0, 1, 2, 2, 2)), "decode": rng.choice((1, 2, 2, 3))},
            hash_bytes=hash_bits // 8,
        )
        self.cluster.network.history = history
        if rng.random() < 0.25:  # a large model: much happens while a step computes
            self.cluster.loop.step_s = 0.02, 0.12
        self._kinds = rng.choices(
            list(FAULTS), [weight for _, weight in FAULTS.values()], k=rng.randint(1, 7)
        )
        self._kinds += also
        beginnings = plan_beginnings(random.Random(rng.random()), hash_bits // 8)
        self._plans = plan_requests(rng, rng.randint(5, 12), rng.random() < 0.12, beginnings)
        self._rng = rng
        self._settled_s = 0.0

    def run(self) -> Result:
        cluster, loop = self.cluster, self.cluster.loop
        with cluster.in_place(), _logs_told(cluster):
            asyncio.set_event_loop(loop)
            try:
                loop.run_until_complete(self._main())
                return self._result()
            finally:
                cluster.network.history = None
                loop.end()
                asyncio.set_event_loop(None)

    def _result(self) -> Result:
        network = self.cluster.network
        complaints = tuple(self._complaints())
        return Result(
            self.seed,
            network.trace.hexdigest(),
            complaints,
            network.faults,
            Counter(client.record.ends[0].outcome for client in self.clients if client.record.ends),
            self.cluster.loop.steps,
            self.cluster.loop.time(),
            self._settled_s,
        )

    async def _main(self) -> None:
        cluster, loop = self.cluster, self.cluster.loop
        cluster.start_router()
        cluster.start_controllers()
        while cluster.router is None or cluster.router.driver.state != "ready":
            assert loop.time() < READY_S, f"the cluster does not get ready: {cluster.complaints}"
            await asyncio.sleep(0.05)
        start = loop.time()
        self.clients = [Client(cluster, replace(plan, at=plan.at + start)) for plan in self._plans]
        self.chaos = Chaos(cluster, random.Random(self._rng.random()))
        self.chaos.router_died = lambda: [client.news.set() for client in self.clients]
        asking = [asyncio.ensure_future(client.run()) for client in self.clients]
        length = max(plan.at for plan in self._plans) + 0.5
        wreaking = [
            asyncio.ensure_future(self._wreak(kind, self._rng.random() * length))
            for kind in self._kinds
        ]
        checking = asyncio.ensure_future(self._check())
        await asyncio.gather(*wreaking)
        self.chaos.heal()
        latest = max(client.plan.deadline for client in self.clients) + 10
        await asyncio.wait(asking, timeout=max(0.0, latest - loop.time()))
        for task in asking:
            if task.done():
                task.result()
        checking.cancel()
        await self._settle()

    async def _wreak(self, kind: str, after: float) -> None:
        await asyncio.sleep(after)
        await FAULTS[kind][0](self.chaos)

    async def _check(self) -> None:
        while True:
            self.cluster.check_books()
            self.cluster.complaints += judge_leaders(
                self.cluster.loop.time(), self.cluster.leaders()
            )
            await asyncio.sleep(CHECK_S)

    async def _settle(self) -> None:
        """Until nobody holds anything, or should not any more."""
        ended, before = self.cluster.loop.time(), list(self.cluster.complaints)
        while True:
            self.cluster.complaints[:] = before
            self.cluster.check_books()
            self.cluster.check_empty()
            self.cluster.check_index()
            self._settled_s = self.cluster.loop.time() - ended
            if self.cluster.complaints == before or self._settled_s > SETTLE_S:
                return
            await asyncio.sleep(0.1)

    def _complaints(self) -> list[str]:
        cluster = self.cluster
        records = [client.record for client in self.clients]
        found = list(cluster.complaints)
        found += judge(records, cluster.faults, MAX_ATTEMPTS, versions=2 if cluster.upgraded else 1)
        found += judge_incarnations(cluster.incarnations)
        found += judge_acts(cluster.redis.store.acts)
        found += [f"a handler let an error through: {one}" for one in cluster.network.unexpected]
        found += [f"nobody took an error: {one}" for one in cluster.loop.failures]
        dispatcher = cluster.router.driver.dispatcher if cluster.router is not None else None
        if dispatcher is not None and (
            dispatcher.unfinished or dispatcher.running or dispatcher.waiting
        ):
            found.append(f"1: the router still has {dispatcher.unfinished} requests")
        if count := cluster.collisions():
            cluster.network.faults["a block had the hash of another prompt's"] += count
        if dispatcher is not None and dispatcher.preemptions:
            cluster.network.faults["a request gave way to another tenant"] += dispatcher.preemptions
        if count := cluster.preemptions():
            cluster.network.faults["a sequence was preempted"] += count
        return found


@contextmanager
def _logs_told(cluster: Cluster) -> Iterator[None]:
    """Production's log lines become part of a history that is told, and cost nothing otherwise."""

    def tell(_logger: object, method: str, event: dict[str, Any]) -> str:
        process = _PROCESS.get()
        words = " ".join(
            f"{key}={value}" for key, value in event.items() if key not in ("event", "component")
        )
        if cluster.network.history is not None:
            name = "-" if process is None else process.name
            cluster.network.history(
                f"{cluster.loop.time():.6f} log {name} {method}: {event['event']} {words}"
            )
        raise structlog.DropEvent

    level = logging.CRITICAL if cluster.network.history is None else logging.INFO
    structlog.configure(
        processors=[tell], wrapper_class=structlog.make_filtering_bound_logger(level)
    )
    try:
        yield
    finally:
        structlog.reset_defaults()


def _config(rng: random.Random) -> ClusterConfig:
    drawn = rng.random()
    kind = "suffix" if drawn < 0.15 else "ngram"
    speculation = {"kind": kind, "tokens": 3, "min_ngram": 1, "max_ngram": 2}
    return ClusterConfig.model_validate(
        {
            "kv": {"block_size": BLOCK},
            "prefill": {"replicas": 0, "chunk_tokens": rng.choice((8, 16))},
            "decode": {
                "replicas": 1,
                "chunk_tokens": 8,
                "max_batch": rng.choice((3, 6)),
                "speculation": speculation if drawn < 0.3 else None,
            },
            "router": {
                "local_below_tokens": rng.choice((4, 10)),
                "max_queue": rng.choice((4, 32)),
                "max_attempts": MAX_ATTEMPTS,
            },
            "transfer": {"transport": rng.choice(("auto", "grpc")), "lease_s": LEASE_S},
        }
    )


def _policy(rebalance: bool, standby: int) -> AutoscalingPolicy:
    return AutoscalingPolicy.model_validate(
        {
            "interval_s": 0.5,
            "rebalance": rebalance,
            "standby": standby,
            "prefill": {"min_replicas": 0, "max_replicas": 3, **_DELAYS, "metrics": [_QUEUE]},
            "decode": {"min_replicas": 1, "max_replicas": 3, **_DELAYS, "metrics": [_QUEUE]},
        }
    )


_DELAYS = {"upscale_delay_s": 0.5, "downscale_delay_s": 2.0}
_QUEUE = {"name": "queue_depth", "target": 2.0}
