"""The cluster's shared state in Redis: what must outlive a process, and nothing that a heartbeat cannot restore.

    kvrelay:epoch, kvrelay:leader_token    counters
    kvrelay:worker:ID, kvrelay:router:ID   heartbeats, each with a time to live
    kvrelay:pending:ID                     likewise, of a worker that no node has room for
    kvrelay:leader                         who scales the pools, with a time to live
    kvrelay:desired                        hash: pool -> wanted number of workers
    kvrelay:names                          hash: pool -> number of the next worker's name
    kvrelay:drains, kvrelay:restarts       sets: ids of workers that an operator asked to drain, to restart
    kvrelay:decisions                      list: the last scaling decisions, newest first
    kvrelay:probe                          what `check_writable` writes

Values are read as if a stranger had written them: what does not parse is skipped, with one warning.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from kvrelay import registry_scripts as scripts
from kvrelay.config import is_loopback
from kvrelay.errors import ConfigError, FailedPrecondition, InvalidArgument, Unavailable
from kvrelay.registry_codec import MAX_VALUE_BYTES, check_name, decode, encode
from kvrelay.telemetry import get_logger
from kvrelay.types import POOLS, PendingWorker, PoolName, RouterLoad, ScalingDecision, WorkerInfo

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_TIMEOUT_S = 2.0  # of one command, its connection included
_DECISIONS_KEPT = 100
_WARNINGS_KEPT = 1000
_EPOCH = "kvrelay:epoch"
_WORKER = "kvrelay:worker:"
_PENDING = "kvrelay:pending:"
_ROUTER = "kvrelay:router:"
_DESIRED = "kvrelay:desired"
_DRAINS = "kvrelay:drains"
_RESTARTS = "kvrelay:restarts"
_NAMES = "kvrelay:names"
_DECISIONS = "kvrelay:decisions"
_PROBE = "kvrelay:probe"
_LEADER = "kvrelay:leader"
_LEADER_TOKEN = "kvrelay:leader_token"

T = TypeVar("T", bound="DataclassInstance")
log = get_logger("registry")


@dataclass(frozen=True, slots=True)
class _PoolSize:
    replicas: int


class Registry:
    """One process's connection, closed when it is left as a context manager.

    Every call is bounded in time and raises Unavailable when Redis does not serve it.
    """

    def __init__(self, client: redis.asyncio.Redis, where: str, loopback_only: bool = False) -> None:
        self._client = client
        self._loopback_only = loopback_only
        self._where = where
        self._warned: dict[str, str] = {}  # key -> what was wrong with its value when last warned of

    @classmethod
    async def connect(cls, url: str, *, loopback_only: bool = False) -> Registry:
        """url: redis://, rediss:// or unix://. Raises ConfigError for any other, Unavailable if nobody answers.

        `loopback_only`: workers elsewhere are not believed, as where this cluster's own listen on loopback. Otherwise
        they may be in private networks. Whoever can write to Redis shall not lead routers to any other place.
        """
        try:
            client = redis.asyncio.Redis.from_url(
                url,
                socket_timeout=None,  # `_bounded` limits each call; redis-py's way, wait_for, can lose a cancellation
                # A pooled connection may have died with the last server.
                retry=Retry(NoBackoff(), 1, (RedisConnectionError,)),
            )
        except ValueError as error:
            raise ConfigError(f"redis.url: {error}") from None
        registry = cls(client, _without_credentials(url), loopback_only)
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

    # Workers

    async def next_epoch(self, last: int = 0) -> int:
        """A number that no worker had before, and above `last`, which Redis may have lost."""
        return int(await self._call("EVAL", scripts.NEXT_EPOCH, 1, _EPOCH, last))

    async def next_name(self, pool: PoolName, at_least: int) -> str:
        """A name that no worker had before, where `at_least` is above the numbers that the caller knows of.

        Of the two who remember, Redis and the caller, either may have lost its memory.
        """
        number = await self._call("EVAL", scripts.NEXT_NAME, 1, _NAMES, pool, at_least)
        return f"{pool}-{int(number)}"

    async def publish_worker(self, info: WorkerInfo, ttl_s: float = 5.0) -> None:
        """Writes the worker's entry for `ttl_s`; FailedPrecondition if a later epoch of the same worker is there."""
        entry = _encoded(info)
        keys = (_WORKER + info.worker_id, _EPOCH)
        newer = await self._call("EVAL", scripts.PUBLISH_WORKER, 2, *keys, info.epoch, entry, _millis(ttl_s))
        if newer:
            raise FailedPrecondition(f"{info.worker_id} epoch {info.epoch} was succeeded by epoch {newer}")

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
        """Raises Unavailable where nothing can be written, as on a replica: entries expire though their owners live."""
        await self._call("SET", _PROBE, 1, "PX", 1000)

    async def publish_pending(self, worker: PendingWorker, ttl_s: float = 5.0) -> None:
        await self._call("SET", _PENDING + worker.worker_id, _encoded(worker), "PX", _millis(ttl_s))

    async def pending(self) -> tuple[PendingWorker, ...]:
        """Workers that were asked for and that no node has room for, by id."""
        return await self._heartbeats(_PENDING, PendingWorker, attrgetter("worker_id"))

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

    async def scale(self, sizes: Mapping[PoolName, tuple[int, int]], leader_token: int) -> bool:
        """The autoscaler's word, (before, after) of each pool, all at once: False, and nothing is written, if a size
        is not what it was before or another leads now.
        """
        values: list[str | int] = [leader_token]
        for pool, (before, after) in sizes.items():
            values += [pool, _encoded(_PoolSize(before)), _encoded(_PoolSize(after))]
        return bool(await self._call("EVAL", scripts.SCALE, 2, _DESIRED, _LEADER_TOKEN, *values))

    async def record_decision(self, decision: ScalingDecision) -> None:
        await self._call("LPUSH", _DECISIONS, _encoded(decision))
        await self._call("LTRIM", _DECISIONS, 0, _DECISIONS_KEPT - 1)

    async def decisions(self, n: int = 20) -> tuple[ScalingDecision, ...]:
        """At most `n`, newest first."""
        raw = await self._call("LRANGE", _DECISIONS, 0, n - 1)
        found = (self._decoded(f"{_DECISIONS} {value[:64]!r}", ScalingDecision, value) for value in raw)
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

    # Leadership of the autoscalers

    async def acquire_leader(self, owner: str, ttl_s: float) -> int | None:
        """Takes or renews the lead. Returns its fencing token, larger than any earlier leader's, or None."""
        keys = (_LEADER, _LEADER_TOKEN)
        token = await self._call("EVAL", scripts.ACQUIRE_LEADER, 2, *keys, _named(owner), _millis(ttl_s))
        return None if token is None else int(token)

    async def release_leader(self, owner: str) -> None:
        await self._call("EVAL", scripts.RELEASE_LEADER, 1, _LEADER, owner)

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
            raise Unavailable(f"Redis at {self._where}: no answer within {_TIMEOUT_S:g} s") from None
        except (RedisError, OSError) as error:
            raise Unavailable(f"Redis at {self._where}: {str(error) or type(error).__name__}") from error

    async def _names(self, key: str) -> frozenset[str]:
        names: set[str] = set()
        for raw in await self._call("SMEMBERS", key):
            try:
                names.add(check_name(raw.decode()))
            except ValueError as error:
                self._skip(f"{key} {raw[:64]!r}", str(error))
        return frozenset(names)

    async def _heartbeats(self, prefix: str, kind: type[T], identity: Callable[[T], str]) -> tuple[T, ...]:
        """The values of all keys that begin with `prefix` and end with their value's identity, in that order."""
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
        self, key: str, kind: type[T], raw: bytes | Exception | None, key_of: Callable[[T], str] | None = None
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
            log.warning("skipped a value in Redis", key=ascii(key), reason=ascii(reason))


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


def _millis(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
