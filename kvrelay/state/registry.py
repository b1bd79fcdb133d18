"""The shared state of the cluster in Redis: data that must outlive a process. Heartbeats can
restore all of it.

    kvrelay:epoch, kvrelay:term            counters
    kvrelay:worker:ID, kvrelay:router:ID   heartbeats, each with a time to live
    kvrelay:controller:ID                  heartbeat of a controller, leading or not
    kvrelay:pending:ID                     heartbeat for a worker that no node has room for
    kvrelay:standby:ID                     heartbeat of a worker without a pool
    kvrelay:ended:ID                       why a worker has ended, for a minute
    kvrelay:changes                        channel: the state of a worker has changed
    kvrelay:leader                         hash: the controllers' lease: owner, term, beat
    kvrelay:desired                        hash: pool -> desired number of workers
    kvrelay:names                          hash: pool -> number of the next worker's name
    kvrelay:drains, kvrelay:restarts       sets: ids of workers to drain, to restart
    kvrelay:adapters                       hash: name -> adapter that an operator has loaded
    kvrelay:decisions                      list: the last scaling decisions, newest first
    kvrelay:delayed:POOL                   heartbeat of a decision that a delay holds back
    kvrelay:probe:ID                       written by `check_writable`

A cluster of several models keeps this once per model, in keys that begin with kvrelay@MODEL.

All values are treated as untrusted input: a value that does not parse is skipped with one warning.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from kvrelay.config.adapters import MAX_ADAPTERS
from kvrelay.config.redis_url import DEFAULT_NAMESPACE
from kvrelay.errors import FailedPrecondition
from kvrelay.loopback import is_loopback
from kvrelay.state import registry_scripts as scripts
from kvrelay.state.redis_connection import millis
from kvrelay.state.registry_keys import RegistryKeys
from kvrelay.state.registry_values import RegistryValues, encoded, valid_name
from kvrelay.types.control_plane import (
    AdapterEntry,
    Claim,
    ControllerInfo,
    LeaseRecord,
    RouterLoad,
    ScalingDecision,
)
from kvrelay.types.workers import (
    POOLS,
    EndedWorker,
    PendingWorker,
    PoolName,
    Role,
    StandbyWorker,
    WorkerInfo,
)

_DECISIONS_KEPT = 100

NO_LEASE = LeaseRecord()


@dataclass(frozen=True, slots=True)
class _PoolSize:
    replicas: int


class Registry(RegistryValues):
    """The cluster's shared state: workers, pool sizes, operators' requests, routers, controllers.

    Every call has a timeout and raises Unavailable when Redis does not serve it.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        loopback_only: bool = False,
        confirm_replicas: int = 0,
    ) -> None:
        """Does not connect yet; see `connect`."""
        super().__init__(url, namespace)
        self._keys = RegistryKeys(namespace)
        self._loopback_only = loopback_only
        self._confirm_replicas = confirm_replicas

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        loopback_only: bool = False,
        confirm_replicas: int = 0,
    ) -> Registry:
        """Connects to Redis. url: redis://, rediss://, unix:// or a URL of Sentinels (`redis_url`).
        Raises ConfigError for any other URL, and Unavailable if Redis does not answer.

        - namespace: the begin of all keys.
        - loopback_only: rejects workers that are not on loopback, for a cluster whose own workers
          listen on loopback. Otherwise, workers may be in private networks. Other addresses are
          never accepted, so that a writer to Redis cannot redirect routers to them.
        - confirm_replicas: number of Redis replicas that must have the controllers' lease before
          the lease is valid.
        """
        registry = cls(
            url,
            namespace=namespace,
            loopback_only=loopback_only,
            confirm_replicas=confirm_replicas,
        )
        try:
            await registry._call("PING")
        except BaseException:
            await registry.close()
            raise
        return registry

    # Workers

    async def next_epoch(self, last: int = 0, claim: Claim | None = None) -> int:
        """Returns an epoch that no worker had before. The epoch is above `last`, which Redis may
        have lost, and above the Unix time in microseconds. So epochs that Redis has lost are not
        reused.

        claim: the lease under which the worker was started. Raises FailedPrecondition if another
        controller has led since, because that controller has started a replacement for this worker.
        """
        lease = ("", 0) if claim is None else (valid_name(claim.owner), claim.term)
        epoch = int(
            await self._call(
                "EVAL",
                scripts.NEXT_EPOCH,
                2,
                self._keys.epoch,
                self._keys.leader,
                last,
                _unix_us(),
                *lease,
            )
        )
        if not epoch:
            raise FailedPrecondition(
                f"controller {lease[0]} started this worker in term {lease[1]}, and another "
                "controller leads now"
            )
        return epoch

    async def next_name(self, role: Role, at_least: int) -> str:
        """Returns a worker name that was not used before. `at_least` must be above all numbers that
        the caller knows.

        Both Redis and the caller keep track of the numbers, because either may lose its state.
        """
        number = await self._call("EVAL", scripts.NEXT_NAME, 1, self._keys.names, role, at_least)
        return self.worker_name(role, int(number))

    def worker_name(self, stem: str, number: int) -> str:
        """Returns the name of a worker in this namespace; `stem` is its role, with or without a
        tag.
        """
        return self._keys.worker_name(stem, number)

    async def publish_worker(self, info: WorkerInfo, ttl_s: float = 5.0) -> None:
        """Writes the worker's entry for `ttl_s` seconds. Raises FailedPrecondition if the same
        worker has an entry of a later epoch.
        """
        entry = encoded(info)
        keys = self._keys
        newer = await self._call(
            "EVAL",
            scripts.PUBLISH_WORKER,
            4,
            keys.worker + info.worker_id,
            keys.epoch,
            keys.term,
            keys.names,
            info.epoch,
            entry,
            millis(ttl_s),
            info.term,
            *keys.role_and_number(info.worker_id),
        )
        if newer:
            raise FailedPrecondition(
                f"{info.worker_id} epoch {info.epoch} was replaced by epoch {newer}"
            )

    async def remove_worker(self, worker_id: str, epoch: int) -> None:
        """Removes the entry of this epoch. The entry of a later epoch stays."""
        await self._call("EVAL", scripts.REMOVE_WORKER, 1, self._keys.worker + worker_id, epoch)

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Returns the workers with a live heartbeat, by id."""
        return await self._heartbeats(self._keys.worker, WorkerInfo, self._id_if_allowed)

    def _id_if_allowed(self, info: WorkerInfo) -> str:
        """Returns the worker's id. Raises ValueError for an address that is not allowed."""
        if self._loopback_only and not is_loopback(info.address):
            raise ValueError(
                f"address {info.address} is not a loopback address, but listen.worker_host is"
            )
        return info.worker_id

    async def publish_pending(self, worker: PendingWorker, ttl_s: float = 5.0) -> None:
        """Writes the entry of a pending worker for `ttl_s` seconds."""
        await self._publish(self._keys.pending + worker.worker_id, worker, ttl_s)

    async def remove_pending(self, worker_id: str) -> None:
        """Removes the entry of a pending worker."""
        await self._call("DEL", self._keys.pending + worker_id)

    async def pending(self) -> tuple[PendingWorker, ...]:
        """Returns the requested workers that no node has room for, by id."""
        return await self._heartbeats(self._keys.pending, PendingWorker, attrgetter("worker_id"))

    async def publish_standby(self, worker: StandbyWorker, ttl_s: float = 5.0) -> None:
        """Writes the entry of a standby worker for `ttl_s` seconds."""
        await self._publish(self._keys.standby + worker.worker_id, worker, ttl_s)

    async def remove_standby(self, worker_id: str) -> None:
        """Removes the entry of a standby worker."""
        await self._call("DEL", self._keys.standby + worker_id)

    async def standbys(self) -> tuple[StandbyWorker, ...]:
        """Returns the standby workers with a live heartbeat, by id."""
        return await self._heartbeats(self._keys.standby, StandbyWorker, attrgetter("worker_id"))

    async def publish_ended(self, worker: EndedWorker, ttl_s: float = 60.0) -> None:
        """Writes for `ttl_s` seconds why a worker has ended."""
        await self._publish(self._keys.ended + worker.worker_id, worker, ttl_s)

    async def ended(self) -> tuple[EndedWorker, ...]:
        """Returns the workers that have ended in the last minute, by id."""
        return await self._heartbeats(self._keys.ended, EndedWorker, attrgetter("worker_id"))

    async def announce_change(self) -> None:
        """Notifies routers that the entry of a worker has changed."""
        await self._call("PUBLISH", self._keys.changes, 1)

    def changes(self) -> AsyncIterator[None]:
        """Yields once for each announced change, endlessly. Changes are lost while nothing listens,
        so callers must also poll.

        Raises Unavailable when Redis does not serve the subscription, or stops serving it.
        """
        return self._messages(self._keys.changes)

    # Pool sizes

    async def desired(self) -> dict[PoolName, int]:
        """Returns the desired number of workers by pool. A pool without a desired size is
        absent.
        """
        values = await self._call("HGETALL", self._keys.desired)
        sizes: dict[PoolName, int] = {}
        for pool in POOLS:
            size = self._decoded(
                f"{self._keys.desired} {pool}", _PoolSize, values.get(pool.encode())
            )
            if size is not None:
                sizes[pool] = size.replicas
        return sizes

    async def set_desired(
        self, sizes: Mapping[PoolName, int], decisions: Iterable[ScalingDecision] = ()
    ) -> None:
        """Sets the sizes that an operator requested, unconditionally, and adds the decisions that
        say so.
        """
        if sizes:
            await self._call(
                "EVAL",
                scripts.SET_SIZES,
                2,
                self._keys.desired,
                self._keys.decisions,
                _DECISIONS_KEPT - 1,
                len(sizes),
                *_words(sizes),
                *map(encoded, decisions),
            )

    async def scale(self, sizes: Mapping[PoolName, tuple[int, int]], claim: Claim) -> bool:
        """Applies the autoscaler's change, (before, after) for each pool, atomically. Returns False
        and writes nothing if a size differs from `before`, or if another controller holds the
        lease.
        """
        values: list[str] = []
        for pool, (before, after) in sizes.items():
            values += [pool, encoded(_PoolSize(before)), encoded(_PoolSize(after))]
        return await self._fenced(scripts.SCALE, self._keys.desired, claim, *values)

    async def restore_desired(self, sizes: Mapping[PoolName, int], claim: Claim) -> bool:
        """Restores sizes that Redis has lost from the leader's memory. Returns False and writes
        nothing if another controller leads.
        """
        return not sizes or await self._fenced(
            scripts.RESTORE_SIZES, self._keys.desired, claim, *_words(sizes)
        )

    async def record_decision(self, decision: ScalingDecision, claim: Claim) -> bool:
        """Adds a scaling decision. Returns False and writes nothing if another controller leads."""
        return await self._fenced(
            scripts.RECORD_DECISION,
            self._keys.decisions,
            claim,
            encoded(decision),
            _DECISIONS_KEPT - 1,
        )

    async def _fenced(self, script: str, key: str, claim: Claim, *words: str | int) -> bool:
        return bool(
            await self._call(
                "EVAL", script, 2, self._keys.leader, key, claim.owner, claim.term, *words
            )
        )

    async def decisions(self, n: int = 20) -> tuple[ScalingDecision, ...]:
        """Returns at most `n` decisions, newest first."""
        raw = await self._call("LRANGE", self._keys.decisions, 0, n - 1)
        found = (
            self._decoded(f"{self._keys.decisions} {value[:64]!r}", ScalingDecision, value)
            for value in raw
        )
        return tuple(decision for decision in found if decision is not None)

    async def publish_delayed(self, decision: ScalingDecision, ttl_s: float) -> None:
        """Writes, for `ttl_s` seconds, the decision about a pool that a delay holds back."""
        await self._publish(self._keys.delayed + decision.pool, decision, ttl_s)

    async def remove_delayed(self, pool: PoolName) -> None:
        """Removes the delayed decision about a pool."""
        await self._call("DEL", self._keys.delayed + pool)

    async def delayed(self) -> tuple[ScalingDecision, ...]:
        """Returns the decisions that a delay holds back, by pool."""
        return await self._heartbeats(self._keys.delayed, ScalingDecision, attrgetter("pool"))

    # Drains and restarts that operators request

    async def request_drain(self, worker_id: str) -> None:
        """Adds a worker to the set of workers to drain. Raises InvalidArgument for an invalid
        name.
        """
        await self._call("SADD", self._keys.drains, valid_name(worker_id))

    async def drains(self) -> frozenset[str]:
        """Returns the workers that operators asked to drain."""
        return await self._names(self._keys.drains)

    async def request_restart(self, worker_ids: Iterable[str]) -> None:
        """Adds workers to the set of workers to restart. Raises InvalidArgument for an invalid
        name.
        """
        if names := [valid_name(one) for one in worker_ids]:
            await self._call("SADD", self._keys.restarts, *names)

    async def restarts(self) -> frozenset[str]:
        """Returns the workers that still have to be replaced."""
        return await self._names(self._keys.restarts)

    async def clear_requests(self, worker_id: str) -> None:
        """Removes the requests for a worker that is gone."""
        await self._call("SREM", self._keys.drains, worker_id)
        await self._call("SREM", self._keys.restarts, worker_id)

    # Adapters that operators load

    async def adapters(self) -> tuple[AdapterEntry, ...]:
        """Returns the adapters that operators have loaded, by name."""
        values = await self._call("HGETALL", self._keys.adapters)
        found = (
            self._decoded(
                f"{self._keys.adapters} {name.decode(errors='backslashreplace')}",
                AdapterEntry,
                raw,
                lambda entry: f"{self._keys.adapters} {entry.name}",
            )
            for name, raw in sorted(values.items())
        )
        return tuple(entry for entry in found if entry is not None)[:MAX_ADAPTERS]

    async def put_adapter(self, entry: AdapterEntry) -> bool:
        """Lists an adapter that is not served yet, or marks a listed one as served. Returns whether
        it did: the name may have other files, or may have been removed before it was served.
        """
        return bool(
            await self._change_adapter(
                scripts.PUT_ADAPTER, entry, encoded(entry), int(entry.served)
            )
        )

    async def withdraw_adapter(self, entry: AdapterEntry) -> None:
        """Removes an adapter whose load has failed. Does nothing if it is served, or if the name
        has other files.
        """
        await self._change_adapter(scripts.WITHDRAW_ADAPTER, entry)

    async def remove_adapter(self, name: str) -> None:
        """Removes an adapter. Workers then unload it."""
        await self._call("HDEL", self._keys.adapters, name)
        await self.announce_change()

    async def _change_adapter(self, script: str, entry: AdapterEntry, *values: str | int) -> object:
        keys = (self._keys.adapters, self._keys.changes)
        names = (entry.name, entry.adapter_id, entry.path)
        return await self._call("EVAL", script, len(keys), *keys, *names, *values)

    # Routers

    async def publish_router(self, load: RouterLoad, ttl_s: float = 5.0) -> None:
        """Writes the entry of a router for `ttl_s` seconds."""
        await self._publish(self._keys.router + load.router_id, load, ttl_s)

    async def remove_router(self, router_id: str) -> None:
        """Removes the entry of a router."""
        await self._call("DEL", self._keys.router + router_id)

    async def routers(self) -> tuple[RouterLoad, ...]:
        """Returns the routers with a live heartbeat, by id."""
        return await self._heartbeats(self._keys.router, RouterLoad, attrgetter("router_id"))

    # Controllers

    async def renew_lease(
        self, owner: str, seen: int, takes: LeaseRecord = NO_LEASE
    ) -> LeaseRecord:
        """Renews the owner's lease, or takes the lease if it is free or still equals `takes`.
        Returns the resulting lease.

        seen: the highest term that the caller knows. A taken lease gets a term above `seen` and
        above all terms that Redis knows. Raises Unavailable also if fewer replicas than
        `confirm_replicas` confirm the lease in time.
        """
        record = (takes.owner, takes.term, takes.beat)
        holder, term, beat = await self._confirmed_call(
            self._confirm_replicas,
            *(
                "EVAL",
                scripts.RENEW_LEASE,
                2,
                self._keys.leader,
                self._keys.term,
                valid_name(owner),
                seen,
                *record,
            ),
        )
        return LeaseRecord(holder.decode(errors="backslashreplace"), int(term), int(beat))

    async def release_lease(self, owner: str) -> None:
        """Releases the lease if `owner` holds it."""
        await self._call("EVAL", scripts.RELEASE_LEASE, 1, self._keys.leader, owner)

    async def publish_controller(self, info: ControllerInfo, ttl_s: float = 5.0) -> None:
        """Writes the entry of a controller for `ttl_s` seconds."""
        await self._publish(self._keys.controller + info.controller_id, info, ttl_s)

    async def remove_controller(self, controller_id: str) -> None:
        """Removes the entry of a controller."""
        await self._call("DEL", self._keys.controller + controller_id)

    async def controllers(self) -> tuple[ControllerInfo, ...]:
        """Returns the controllers with a live heartbeat, by id."""
        return await self._heartbeats(
            self._keys.controller, ControllerInfo, attrgetter("controller_id")
        )


def _words(sizes: Mapping[PoolName, int]) -> list[str]:
    return [word for pool, size in sizes.items() for word in (pool, encoded(_PoolSize(size)))]


def _unix_us() -> int:
    return time.time_ns() // 1000
