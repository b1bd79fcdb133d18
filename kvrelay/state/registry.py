"""The shared state of the cluster in Redis: data that must outlive a process. Heartbeats can
restore all of it.

    kvrelay:epoch, kvrelay:term            counters
    kvrelay:worker:ID, kvrelay:router:ID   heartbeats, each with a time to live
    kvrelay:controller:ID                  heartbeat of a controller, leading or not
    kvrelay:pending:ID                     heartbeat for a worker that no node has room for
    kvrelay:standby:ID                     heartbeat of a worker without a pool
    kvrelay:changes                        channel: the state of a worker has changed
    kvrelay:leader                         hash: the controllers' lease: owner, term, beat
    kvrelay:desired                        hash: pool -> desired number of workers
    kvrelay:names                          hash: pool -> number of the next worker's name
    kvrelay:drains, kvrelay:restarts       sets: ids of workers to drain, to restart
    kvrelay:decisions                      list: the last scaling decisions, newest first
    kvrelay:probe:ID                       written by `check_writable`

All values are treated as untrusted input: a value that does not parse is skipped with one warning.
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

# Timeout of one command, including its connection.
_TIMEOUT_S = 2.0
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
    """The connection of one process to Redis. Leaving the context manager closes it.

    Every call has a timeout and raises Unavailable when Redis does not serve it.
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
        # Closed with the client.
        self._sentinels: list[redis.asyncio.Redis] = []
        self._probe, self._probes = secrets.token_hex(8), 0
        self._loopback_only = loopback_only
        self._where = where
        # Key -> the problem with its value that was logged last.
        self._warned: dict[str, str] = {}

    @classmethod
    async def connect(
        cls, url: str, *, loopback_only: bool = False, confirm_replicas: int = 0
    ) -> Registry:
        """Connects to Redis. url: redis://, rediss://, unix:// or a URL of Sentinels (`redis_url`).
        Raises ConfigError for any other URL, and Unavailable if Redis does not answer.

        - loopback_only: rejects workers that are not on loopback, for a cluster whose own workers
          listen on loopback. Otherwise, workers may be in private networks. Other addresses are
          never accepted, so that a writer to Redis cannot redirect routers to them.
        - confirm_replicas: number of Redis replicas that must have the controllers' lease before
          the lease is valid.
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
        """Closes the connections to Redis and to the Sentinels."""
        await self._client.aclose()
        if self._sentinels:
            await self._client.connection_pool.disconnect()
        for sentinel in self._sentinels:
            await sentinel.aclose()

    # Workers

    async def next_epoch(self, last: int = 0, claim: Claim | None = None) -> int:
        """Returns an epoch that no worker had before. The epoch is above `last`, which Redis may
        have lost, and above the Unix time in microseconds. So epochs that Redis has lost are not
        reused.

        claim: the lease under which the worker was started. Raises FailedPrecondition if another
        controller has led since, because that controller has started a replacement for this worker.
        """
        lease = ("", 0) if claim is None else (_named(claim.owner), claim.term)
        epoch = int(
            await self._call(
                "EVAL", scripts.NEXT_EPOCH, 2, _EPOCH, _LEADER, last, _unix_us(), *lease
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
        number = await self._call("EVAL", scripts.NEXT_NAME, 1, _NAMES, role, at_least)
        return f"{role}-{int(number)}"

    async def publish_worker(self, info: WorkerInfo, ttl_s: float = 5.0) -> None:
        """Writes the worker's entry for `ttl_s` seconds. Raises FailedPrecondition if the same
        worker has an entry of a later epoch.
        """
        entry = _encoded(info)
        keys = (_WORKER + info.worker_id, _EPOCH, _TERM)
        newer = await self._call(
            "EVAL", scripts.PUBLISH_WORKER, 3, *keys, info.epoch, entry, _millis(ttl_s), info.term
        )
        if newer:
            raise FailedPrecondition(
                f"{info.worker_id} epoch {info.epoch} was replaced by epoch {newer}"
            )

    async def remove_worker(self, worker_id: str, epoch: int) -> None:
        """Removes the entry of this epoch. The entry of a later epoch stays."""
        await self._call("EVAL", scripts.REMOVE_WORKER, 1, _WORKER + worker_id, epoch)

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Returns the workers with a live heartbeat, by id."""
        return await self._heartbeats(_WORKER, WorkerInfo, self._id_if_allowed)

    def _id_if_allowed(self, info: WorkerInfo) -> str:
        """Returns the worker's id. Raises ValueError for an address that is not allowed."""
        if self._loopback_only and not is_loopback(info.address):
            raise ValueError(
                f"address {info.address} is not a loopback address, but listen.worker_host is"
            )
        return info.worker_id

    async def check_writable(self) -> None:
        """Raises Unavailable if Redis accepts no writes, as on a replica: then entries expire
        although their owners live. Raises Unavailable also if a read does not return the last
        write: then entries of other processes may be missing too.
        """
        self._probes += 1
        key = f"{_PROBE}:{self._probe}"
        await self._call("SET", key, self._probes, "PX", _millis(2 * _TIMEOUT_S))
        if await self._call("GETRANGE", key, 0, 32) != str(self._probes).encode():
            raise Unavailable(
                f"Redis at {self._where} returned an older value than the last written one"
            )

    async def publish_pending(self, worker: PendingWorker, ttl_s: float = 5.0) -> None:
        """Writes the entry of a pending worker for `ttl_s` seconds."""
        await self._call("SET", _PENDING + worker.worker_id, _encoded(worker), "PX", _millis(ttl_s))

    async def pending(self) -> tuple[PendingWorker, ...]:
        """Returns the requested workers that no node has room for, by id."""
        return await self._heartbeats(_PENDING, PendingWorker, attrgetter("worker_id"))

    async def publish_standby(self, worker: StandbyWorker, ttl_s: float = 5.0) -> None:
        """Writes the entry of a standby worker for `ttl_s` seconds."""
        await self._call("SET", _STANDBY + worker.worker_id, _encoded(worker), "PX", _millis(ttl_s))

    async def remove_standby(self, worker_id: str) -> None:
        """Removes the entry of a standby worker."""
        await self._call("DEL", _STANDBY + worker_id)

    async def standbys(self) -> tuple[StandbyWorker, ...]:
        """Returns the standby workers with a live heartbeat, by id."""
        return await self._heartbeats(_STANDBY, StandbyWorker, attrgetter("worker_id"))

    async def announce_change(self) -> None:
        """Notifies routers that the entry of a worker has changed."""
        await self._call("PUBLISH", _CHANGES, 1)

    async def changes(self) -> AsyncIterator[None]:
        """Yields once for each announced change, endlessly. Changes are lost while nothing listens,
        so callers must also poll.

        Raises Unavailable when Redis does not serve the subscription, or stops serving it.
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
        """Returns the desired number of workers by pool. A pool without a desired size is
        absent.
        """
        values = await self._call("HGETALL", _DESIRED)
        sizes: dict[PoolName, int] = {}
        for pool in POOLS:
            size = self._decoded(f"{_DESIRED} {pool}", _PoolSize, values.get(pool.encode()))
            if size is not None:
                sizes[pool] = size.replicas
        return sizes

    async def set_desired(self, sizes: Mapping[PoolName, int]) -> None:
        """Sets the sizes that an operator requested, unconditionally."""
        words = [word for pool, size in sizes.items() for word in (pool, _encoded(_PoolSize(size)))]
        if words:
            await self._call("HSET", _DESIRED, *words)

    async def scale(self, sizes: Mapping[PoolName, tuple[int, int]], claim: Claim) -> bool:
        """Applies the autoscaler's change, (before, after) for each pool, atomically. Returns False
        and writes nothing if a size differs from `before`, or if another controller holds the
        lease.
        """
        values: list[str] = []
        for pool, (before, after) in sizes.items():
            values += [pool, _encoded(_PoolSize(before)), _encoded(_PoolSize(after))]
        return await self._fenced(scripts.SCALE, _DESIRED, claim, *values)

    async def restore_desired(self, sizes: Mapping[PoolName, int], claim: Claim) -> bool:
        """Restores sizes that Redis has lost from the leader's memory. Returns False and writes
        nothing if another controller leads.
        """
        values = [
            word for pool, size in sizes.items() for word in (pool, _encoded(_PoolSize(size)))
        ]
        return not values or await self._fenced(scripts.RESTORE_SIZES, _DESIRED, claim, *values)

    async def record_decision(self, decision: ScalingDecision, claim: Claim) -> bool:
        """Adds a scaling decision. Returns False and writes nothing if another controller leads."""
        return await self._fenced(
            scripts.RECORD_DECISION, _DECISIONS, claim, _encoded(decision), _DECISIONS_KEPT - 1
        )

    async def _fenced(self, script: str, key: str, claim: Claim, *words: str | int) -> bool:
        return bool(
            await self._call("EVAL", script, 2, _LEADER, key, claim.owner, claim.term, *words)
        )

    async def decisions(self, n: int = 20) -> tuple[ScalingDecision, ...]:
        """Returns at most `n` decisions, newest first."""
        raw = await self._call("LRANGE", _DECISIONS, 0, n - 1)
        found = (
            self._decoded(f"{_DECISIONS} {value[:64]!r}", ScalingDecision, value) for value in raw
        )
        return tuple(decision for decision in found if decision is not None)

    # Drains and restarts that operators request

    async def request_drain(self, worker_id: str) -> None:
        """Adds a worker to the set of workers to drain. Raises InvalidArgument for an invalid
        name.
        """
        await self._call("SADD", _DRAINS, _named(worker_id))

    async def drains(self) -> frozenset[str]:
        """Returns the workers that operators asked to drain."""
        return await self._names(_DRAINS)

    async def request_restart(self, worker_ids: Iterable[str]) -> None:
        """Adds workers to the set of workers to restart. Raises InvalidArgument for an invalid
        name.
        """
        if names := [_named(one) for one in worker_ids]:
            await self._call("SADD", _RESTARTS, *names)

    async def restarts(self) -> frozenset[str]:
        """Returns the workers that still have to be replaced."""
        return await self._names(_RESTARTS)

    async def clear_requests(self, worker_id: str) -> None:
        """Removes the requests for a worker that is gone."""
        await self._call("SREM", _DRAINS, worker_id)
        await self._call("SREM", _RESTARTS, worker_id)

    # Routers

    async def publish_router(self, load: RouterLoad, ttl_s: float = 5.0) -> None:
        """Writes the entry of a router for `ttl_s` seconds."""
        await self._call("SET", _ROUTER + load.router_id, _encoded(load), "PX", _millis(ttl_s))

    async def remove_router(self, router_id: str) -> None:
        """Removes the entry of a router."""
        await self._call("DEL", _ROUTER + router_id)

    async def routers(self) -> tuple[RouterLoad, ...]:
        """Returns the routers with a live heartbeat, by id."""
        return await self._heartbeats(_ROUTER, RouterLoad, attrgetter("router_id"))

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
                # WAIT covers only the writes of its own connection.
                async with self._client.pipeline(transaction=False) as pipe:
                    pipe.execute_command(*words)
                    pipe.execute_command("WAIT", self._confirm_replicas, _millis(_TIMEOUT_S / 2))
                    answer, confirmed = await pipe.execute()
                if confirmed < self._confirm_replicas:
                    raise Unavailable(
                        f"Redis at {self._where}: {confirmed} replicas confirmed the lease "
                        f"within {_TIMEOUT_S / 2:g} s, and redis.confirm_replicas requires "
                        f"{self._confirm_replicas}"
                    )
        return LeaseRecord(
            answer[0].decode(errors="backslashreplace"), int(answer[1]), int(answer[2])
        )

    async def release_lease(self, owner: str) -> None:
        """Releases the lease if `owner` holds it."""
        await self._call("EVAL", scripts.RELEASE_LEASE, 1, _LEADER, owner)

    async def publish_controller(self, info: ControllerInfo, ttl_s: float = 5.0) -> None:
        """Writes the entry of a controller for `ttl_s` seconds."""
        await self._call(
            "SET", _CONTROLLER + info.controller_id, _encoded(info), "PX", _millis(ttl_s)
        )

    async def remove_controller(self, controller_id: str) -> None:
        """Removes the entry of a controller."""
        await self._call("DEL", _CONTROLLER + controller_id)

    async def controllers(self) -> tuple[ControllerInfo, ...]:
        """Returns the controllers with a live heartbeat, by id."""
        return await self._heartbeats(_CONTROLLER, ControllerInfo, attrgetter("controller_id"))

    # Internals

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
        """Returns the values of all keys that consist of `prefix` and the identity of their value,
        sorted by key.
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
        # `raw` is empty if the entry expired after the scan.
        for key, raw in zip(names, answers, strict=True):
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
        """Decodes a value. Returns None if there is no value or the value is invalid."""
        if raw is None:
            return None
        try:
            if isinstance(raw, Exception):
                # The value is not a string.
                raise ValueError(str(raw))
            value = decode(kind, raw)
            if key_of is not None and key_of(value) != key:
                raise ValueError(f"the value belongs to {key_of(value)}")
        except ValueError as error:
            self._skip(key, str(error))
            return None
        self._warned.pop(key, None)
        return value

    def _skip(self, key: str, reason: str) -> None:
        """Logs a warning once per problem of a key."""
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
    """Returns the client of the primary, and the clients of the Sentinels that watch it. They
    connect on first use. Raises ValueError.
    """
    # `_bounded` limits each call; redis-py's own timeout, wait_for, can lose a cancellation. The
    # retry is for pooled connections that died with the previous server.
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
