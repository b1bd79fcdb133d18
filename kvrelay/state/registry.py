"""The cluster's shared state in Redis: what must outlive a process, and nothing that a heartbeat
cannot restore.

    kvrelay:epoch, kvrelay:term            counters
    kvrelay:worker:ID, kvrelay:router:ID   heartbeats, each with a time to live
    kvrelay:controller:ID                  likewise, of a controller, whether it leads or not
    kvrelay:pending:ID                     likewise, of a worker that no node has room for
    kvrelay:standby:ID                     likewise, of a worker of no pool
    kvrelay:changes                        channel: a worker's state has changed
    kvrelay:leader                         hash: the controllers' lease: owner, term, beat
    kvrelay:desired                        hash: pool -> wanted number of workers
    kvrelay:names                          hash: pool -> number of the next worker's name
    kvrelay:drains, kvrelay:restarts       sets: ids of workers to drain, to restart
    kvrelay:decisions                      list: the last scaling decisions, newest first
    kvrelay:probe:ID                       what `check_writable` writes

Values are read as if a stranger had written them: what does not parse is skipped, with one warning.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from kvrelay.config.redis_url import Sentinels
from kvrelay.config.schema import is_loopback
from kvrelay.errors import ConfigError, FailedPrecondition, InvalidArgument, Unavailable
from kvrelay.process.telemetry import get_logger
from kvrelay.state import registry_scripts as scripts
from kvrelay.state.registry_codec import MAX_VALUE_BYTES, check_name, decode, encode
from kvrelay.types import (
    POOLS,
    Claim,
    ControllerInfo,
    LeaseRecord,
    PendingWorker,
    PoolName,
    Role,
    RouterLoad,
    ScalingDecision,
    StandbyWorker,
    WorkerInfo,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_TIMEOUT_S = 2.0  # of one command, its connection included
_DECISIONS_KEPT = 100
_WARNINGS_KEPT = 1000
_EPOCH = "kvrelay:epoch"
_WORKER = "kvrelay:worker:"
_PENDING = "kvrelay:pending:"
_STANDBY = "kvrelay:standby:"
_CHANGES = "kvrelay:changes"
_ROUTER = "kvrelay:router:"
_CONTROLLER = "kvrelay:controller:"
_DESIRED = "kvrelay:desired"
_DRAINS = "kvrelay:drains"
_RESTARTS = "kvrelay:restarts"
_NAMES = "kvrelay:names"
_DECISIONS = "kvrelay:decisions"
_PROBE = "kvrelay:probe"
_LEADER = "kvrelay:leader"
_TERM = "kvrelay:term"

NO_LEASE = LeaseRecord()

T = TypeVar("T", bound="DataclassInstance")
log = get_logger("registry")


@dataclass(frozen=True, slots=True)
class _PoolSize:
    replicas: int


class Registry:
    """One process's connection, closed when it is left as a context manager.

    Every call is bounded in time and raises Unavailable when Redis does not serve it.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        where: str,
        loopback_only: bool = False,
        confirm_replicas: int = 0,
    ) -> None:
        self._client = client
        self._confirm_replicas = confirm_replicas
        self._sentinels: list[redis.asyncio.Redis] = []  # closed with the client
        self._probe, self._probes = secrets.token_hex(8), 0
        self._loopback_only = loopback_only
        self._where = where
        # Key -> what was wrong with its value when last warned of
        self._warned: dict[str, str] = {}

    @classmethod
    async def connect(
        cls, url: str, *, loopback_only: bool = False, confirm_replicas: int = 0
    ) -> Registry:
        """url: redis://, rediss://, unix:// or that of Sentinels (`redis_url`). Raises ConfigError
        for any other, Unavailable if nobody answers.

        `loopback_only`: workers elsewhere are not believed, as where this cluster's own listen on
        loopback. Otherwise they may be in private networks. Whoever can write to Redis shall not
        lead routers to any other place. confirm_replicas: how many of Redis's replicas must have
        the controllers' lease before it counts.
        """
        try:
            client, sentinels = _clients(url)
        except ValueError as error:
            raise ConfigError(f"redis.url: {error}") from None
        registry = cls(client, _without_credentials(url), loopback_only, confirm_replicas)
        registry._sentinels = sentinels
        try:
            await registry._call("PING")
        except BaseException:
            await registry.close()
            raise
        return registry

    async def __aenter__(self) -> Registry:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.aclose()
        if self._sentinels:
            await self._client.connection_pool.disconnect()
        for sentinel in self._sentinels:
            await sentinel.aclose()

    # Workers

    async def next_epoch(self, last: int = 0, claim: Claim | None = None) -> int:
        """A number that no worker had before. It is above `last`, which Redis may have lost, and
        above the Unix time in microseconds, so that numbers which Redis has lost are not given
        again.

        claim: the lease under which the worker was started. Raises FailedPrecondition if another
        controller has led since: it has started others in this worker's place.
        """
        lease = ("", 0) if claim is None else (_named(claim.owner), claim.term)
        epoch = int(
            await self._call(
                "EVAL", scripts.NEXT_EPOCH, 2, _EPOCH, _LEADER, last, _unix_us(), *lease
            )
        )
        if not epoch:
            raise FailedPrecondition(
                f"controller {lease[0]} started this worker in term {lease[1]}; another leads now"
            )
        return epoch

    async def next_name(self, role: Role, at_least: int) -> str:
        """A name that no worker had before, where `at_least` is above the numbers that the caller
        knows of.

        Of the two who remember, Redis and the caller, either may have lost its memory.
        """
        number = await self._call("EVAL", scripts.NEXT_NAME, 1, _NAMES, role, at_least)
        return f"{role}-{int(number)}"

    async def publish_worker(self, info: WorkerInfo, ttl_s: float = 5.0) -> None:
        """Writes the worker's entry for `ttl_s`; FailedPrecondition if a later epoch of the same
        worker is there.
        """
        entry = _encoded(info)
        keys = (_WORKER + info.worker_id, _EPOCH, _TERM)
        newer = await self._call(
            "EVAL", scripts.PUBLISH_WORKER, 3, *keys, info.epoch, entry, _millis(ttl_s), info.term
        )
        if newer:
            raise FailedPrecondition(
                f"{info.worker_id} epoch {info.epoch} was succeeded by epoch {newer}"
            )

    async def remove_worker(self, worker_id: str, epoch: int) -> None:
        """Removes that incarnation's entry; a later one's stays."""
        await self._call("EVAL", scripts.REMOVE_WORKER, 1, _WORKER + worker_id, epoch)

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Workers with a live heartbeat, by id."""
        return await self._heartbeats(_WORKER, WorkerInfo, self._id_if_allowed)

    def _id_if_allowed(self, info: WorkerInfo) -> str:
        """Raises ValueError."""
        if self._loopback_only and not is_loopback(info.address):
            raise ValueError(f"address {info.address} is not on loopback, as listen.worker_host is")
        return info.worker_id

    async def check_writable(self) -> None:
        """Raises Unavailable where nothing can be written, as on a replica: entries expire though
        their owners live. And where what is read is not what was written: then others' entries may
        be missing, too.
        """
        self._probes += 1
        key = f"{_PROBE}:{self._probe}"
        await self._call("SET", key, self._probes, "PX", _millis(2 * _TIMEOUT_S))
        if await self._call("GETRANGE", key, 0, 32) != str(self._probes).encode():
            raise Unavailable(f"Redis at {self._where}: what is read is not what was last written")

    async def publish_pending(self, worker: PendingWorker, ttl_s: float = 5.0) -> None:
        await self._call("SET", _PENDING + worker.worker_id, _encoded(worker), "PX", _millis(ttl_s))

    async def pending(self) -> tuple[PendingWorker, ...]:
        """Workers that were asked for and that no node has room for, by id."""
        return await self._heartbeats(_PENDING, PendingWorker, attrgetter("worker_id"))

    async def publish_standby(self, worker: StandbyWorker, ttl_s: float = 5.0) -> None:
        await self._call("SET", _STANDBY + worker.worker_id, _encoded(worker), "PX", _millis(ttl_s))

    async def remove_standby(self, worker_id: str) -> None:
        await self._call("DEL", _STANDBY + worker_id)

    async def standbys(self) -> tuple[StandbyWorker, ...]:
        """Standby workers with a live heartbeat, by id."""
        return await self._heartbeats(_STANDBY, StandbyWorker, attrgetter("worker_id"))

    async def announce_change(self) -> None:
        """Tells routers that a worker's entry says something new."""
        await self._call("PUBLISH", _CHANGES, 1)

    async def changes(self) -> AsyncIterator[None]:
        """Yields for each announced change, without end. Changes while nobody listens are lost:
        poll as well.

        Raises Unavailable when Redis does not serve it, or does so no longer.
        """
        async with self._client.pubsub(ignore_subscribe_messages=True) as channel:
            async with self._bounded():
                await channel.subscribe(_CHANGES)
            try:
                async for _ in channel.listen():
                    yield
            except (RedisError, OSError) as error:
                raise Unavailable(
                    f"Redis at {self._where}: {str(error) or type(error).__name__}"
                ) from error

    # Pool sizes

    async def desired(self) -> dict[PoolName, int]:
        """Wanted number of workers; a pool whose size nobody has set is absent."""
        values = await self._call("HGETALL", _DESIRED)
        sizes: dict[PoolName, int] = {}
        for pool in POOLS:
            size = self._decoded(f"{_DESIRED} {pool}", _PoolSize, values.get(pool.encode()))
            if size is not None:
                sizes[pool] = size.replicas
        return sizes

    async def set_desired(self, sizes: Mapping[PoolName, int]) -> None:
        """The operator's word: unconditional."""
        words = [word for pool, size in sizes.items() for word in (pool, _encoded(_PoolSize(size)))]
        if words:
            await self._call("HSET", _DESIRED, *words)

    async def scale(self, sizes: Mapping[PoolName, tuple[int, int]], claim: Claim) -> bool:
        """The autoscaler's word, (before, after) of each pool, all at once: False, and nothing is
        written, if a size is not what it was before or the lease is another's now.
        """
        values: list[str] = []
        for pool, (before, after) in sizes.items():
            values += [pool, _encoded(_PoolSize(before)), _encoded(_PoolSize(after))]
        return await self._fenced(scripts.SCALE, _DESIRED, claim, *values)

    async def restore_desired(self, sizes: Mapping[PoolName, int], claim: Claim) -> bool:
        """The leader's memory of sizes that Redis has lost: False, and nothing is written, if
        another leads now.
        """
        values = [
            word for pool, size in sizes.items() for word in (pool, _encoded(_PoolSize(size)))
        ]
        return not values or await self._fenced(scripts.RESTORE_SIZES, _DESIRED, claim, *values)

    async def record_decision(self, decision: ScalingDecision, claim: Claim) -> bool:
        """False, and nothing is written, if another leads now."""
        return await self._fenced(
            scripts.RECORD_DECISION, _DECISIONS, claim, _encoded(decision), _DECISIONS_KEPT - 1
        )

    async def _fenced(self, script: str, key: str, claim: Claim, *words: str | int) -> bool:
        return bool(
            await self._call("EVAL", script, 2, _LEADER, key, claim.owner, claim.term, *words)
        )

    async def decisions(self, n: int = 20) -> tuple[ScalingDecision, ...]:
        """At most `n`, newest first."""
        raw = await self._call("LRANGE", _DECISIONS, 0, n - 1)
        found = (
            self._decoded(f"{_DECISIONS} {value[:64]!r}", ScalingDecision, value) for value in raw
        )
        return tuple(decision for decision in found if decision is not None)

    # Draining and restarting, as an operator wants it

    async def request_drain(self, worker_id: str) -> None:
        await self._call("SADD", _DRAINS, _named(worker_id))

    async def drains(self) -> frozenset[str]:
        return await self._names(_DRAINS)

    async def request_restart(self, worker_ids: Iterable[str]) -> None:
        if names := [_named(one) for one in worker_ids]:
            await self._call("SADD", _RESTARTS, *names)

    async def restarts(self) -> frozenset[str]:
        """Workers that are still to be replaced."""
        return await self._names(_RESTARTS)

    async def clear_requests(self, worker_id: str) -> None:
        """Of a worker that is gone."""
        await self._call("SREM", _DRAINS, worker_id)
        await self._call("SREM", _RESTARTS, worker_id)

    # Routers

    async def publish_router(self, load: RouterLoad, ttl_s: float = 5.0) -> None:
        await self._call("SET", _ROUTER + load.router_id, _encoded(load), "PX", _millis(ttl_s))

    async def remove_router(self, router_id: str) -> None:
        await self._call("DEL", _ROUTER + router_id)

    async def routers(self) -> tuple[RouterLoad, ...]:
        """Routers with a live heartbeat, by id."""
        return await self._heartbeats(_ROUTER, RouterLoad, attrgetter("router_id"))

    # Controllers

    async def renew_lease(
        self, owner: str, seen: int, takes: LeaseRecord = NO_LEASE
    ) -> LeaseRecord:
        """Renews the owner's lease, or takes the lease if it is free or still is `takes`. Returns
        what it is then.

        seen: the highest term that the caller knows of. A lease that is taken gets a term above it
        and above all that Redis knows. Raises Unavailable too where fewer replicas than
        `confirm_replicas` have it in time.
        """
        words = (
            "EVAL",
            scripts.RENEW_LEASE,
            2,
            _LEADER,
            _TERM,
            _named(owner),
            seen,
            takes.owner,
            takes.term,
            takes.beat,
        )
        async with self._bounded():
            if not self._confirm_replicas:
                answer: Any = await self._client.execute_command(*words)  # type: ignore[no-untyped-call]
            else:
                # WAIT is about the writes of its own connection.
                async with self._client.pipeline(transaction=False) as pipe:
                    pipe.execute_command(*words)
                    pipe.execute_command("WAIT", self._confirm_replicas, _millis(_TIMEOUT_S / 2))
                    answer, confirmed = await pipe.execute()
                if confirmed < self._confirm_replicas:
                    raise Unavailable(
                        f"Redis at {self._where}: {confirmed} replicas have confirmed the lease "
                        f"within {_TIMEOUT_S / 2:g} s, and redis.confirm_replicas is "
                        f"{self._confirm_replicas}"
                    )
        return LeaseRecord(
            answer[0].decode(errors="backslashreplace"), int(answer[1]), int(answer[2])
        )

    async def release_lease(self, owner: str) -> None:
        await self._call("EVAL", scripts.RELEASE_LEASE, 1, _LEADER, owner)

    async def publish_controller(self, info: ControllerInfo, ttl_s: float = 5.0) -> None:
        await self._call(
            "SET", _CONTROLLER + info.controller_id, _encoded(info), "PX", _millis(ttl_s)
        )

    async def remove_controller(self, controller_id: str) -> None:
        await self._call("DEL", _CONTROLLER + controller_id)

    async def controllers(self) -> tuple[ControllerInfo, ...]:
        """Controllers with a live heartbeat, by id."""
        return await self._heartbeats(_CONTROLLER, ControllerInfo, attrgetter("controller_id"))

    # Plumbing

    async def _call(self, *words: str | int) -> Any:
        async with self._bounded():
            return await self._client.execute_command(*words)  # type: ignore[no-untyped-call]

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                yield
        except TimeoutError:
            raise Unavailable(
                f"Redis at {self._where}: no answer within {_TIMEOUT_S:g} s"
            ) from None
        except (RedisError, OSError) as error:
            raise Unavailable(
                f"Redis at {self._where}: {str(error) or type(error).__name__}"
            ) from error

    async def _names(self, key: str) -> frozenset[str]:
        names: set[str] = set()
        for raw in await self._call("SMEMBERS", key):
            try:
                names.add(check_name(raw.decode()))
            except ValueError as error:
                self._skip(f"{key} {raw[:64]!r}", str(error))
        return frozenset(names)

    async def _heartbeats(
        self, prefix: str, kind: type[T], identity: Callable[[T], str]
    ) -> tuple[T, ...]:
        """The values of all keys that begin with `prefix` and end with their value's identity, in
        that order.
        """
        keys: set[bytes] = set()
        cursor = 0
        while True:
            cursor, page = await self._call("SCAN", cursor, "MATCH", prefix + "*", "COUNT", 1000)
            keys.update(page)
            if not cursor:
                break
        names = sorted(keys)
        async with self._bounded(), self._client.pipeline(transaction=False) as pipe:
            for key in names:
                pipe.execute_command("GETRANGE", key, 0, MAX_VALUE_BYTES)
            answers = await pipe.execute(raise_on_error=False)
        found = []
        for key, raw in zip(names, answers, strict=True):  # empty: it expired after the scan
            name = key.decode(errors="backslashreplace")
            value = self._decoded(name, kind, raw or None, lambda v: prefix + identity(v))
            if value is not None:
                found.append(value)
        return tuple(found)

    def _decoded(
        self,
        key: str,
        kind: type[T],
        raw: bytes | Exception | None,
        key_of: Callable[[T], str] | None = None,
    ) -> T | None:
        """None if there is no value, or none that can be believed."""
        if raw is None:
            return None
        try:
            if isinstance(raw, Exception):
                raise ValueError(str(raw))  # not a string
            value = decode(kind, raw)
            if key_of is not None and key_of(value) != key:
                raise ValueError(f"the value belongs to {key_of(value)}")
        except ValueError as error:
            self._skip(key, str(error))
            return None
        self._warned.pop(key, None)
        return value

    def _skip(self, key: str, reason: str) -> None:
        """Warns once as long as the same is wrong with the key."""
        if self._warned.get(key) != reason:
            if len(self._warned) >= _WARNINGS_KEPT:
                self._warned.clear()
            self._warned[key] = reason
            log.warning("registry_value_skipped", key=ascii(key), reason=ascii(reason))


def _encoded(value: DataclassInstance) -> str:
    try:
        return encode(value)
    except ValueError as error:
        raise InvalidArgument(f"{type(value).__name__.lstrip('_')}: {error}") from None


def _named(name: str) -> str:
    try:
        return check_name(name)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None


def _unix_us() -> int:
    return time.time_ns() // 1000


def _millis(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _clients(url: str) -> tuple[redis.asyncio.Redis, list[redis.asyncio.Redis]]:
    """Of the primary, and of the Sentinels that know it. They connect when they are first used.
    Raises ValueError.
    """
    # `_bounded` limits each call; redis-py's way, wait_for, can lose a cancellation. And a pooled
    # connection may have died with the last server.
    options: dict[str, Any] = {
        "socket_timeout": None,
        "retry": Retry(NoBackoff(), 1, (RedisConnectionError,)),
    }
    sentinels = Sentinels.parse(url)
    if sentinels is None:
        return redis.asyncio.Redis.from_url(url, **options), []
    if sentinels.tls:
        options["ssl"] = True
    watch = Sentinel(  # type: ignore[no-untyped-call]
        list(sentinels.addresses),
        sentinel_kwargs=dict(options),
        db=sentinels.db,
        username=sentinels.username,
        password=sentinels.password,
        **options,
    )
    client: redis.asyncio.Redis = watch.master_for(sentinels.service)
    return client, watch.sentinels


def _without_credentials(url: str) -> str:
    sentinels = Sentinels.parse(url)
    if sentinels is not None:
        return (
            ",".join(f"{host}:{port}" for host, port in sentinels.addresses)
            + f"/{sentinels.service}"
        )
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
