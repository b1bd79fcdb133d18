"""The connection of one process to Redis. Every call has a timeout."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Self
from urllib.parse import urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from kvrelay.config.redis_url import DEFAULT_NAMESPACE, Sentinels
from kvrelay.errors import ConfigError, Unavailable

# Timeout of one command, including its connection.
TIMEOUT_S = 2.0
# Calls at a time, each of which has a connection: many workers may come or go at once.
MAX_CALLS = 32

Command = tuple[str | int | bytes, ...]


class RedisConnection:
    """Sends commands to Redis. Leaving the context manager closes the connection.

    Every call has a timeout and raises Unavailable when Redis does not serve it.
    """

    def __init__(self, url: str, namespace: str = DEFAULT_NAMESPACE) -> None:
        """Does not connect yet. url: redis://, rediss://, unix:// or a URL of Sentinels
        (`redis_url`). Raises ConfigError for any other URL.
        """
        try:
            self._client, self._sentinels = _clients(url)
        except ValueError as error:
            raise ConfigError(f"redis.url: {error}") from None
        self._where = _without_credentials(url)
        self._namespace = namespace
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._probe, self._probes = secrets.token_hex(8), 0

    async def __aenter__(self) -> Self:
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

    async def check_writable(self) -> None:
        """Raises Unavailable if Redis accepts no writes, as on a replica: then entries expire
        although their owners live. Raises Unavailable also if a read does not return the last
        write: then entries of other processes may be missing too.
        """
        self._probes += 1
        key = f"{self._namespace}:probe:{self._probe}"
        await self._call("SET", key, self._probes, "PX", millis(2 * TIMEOUT_S))
        if await self._call("GETRANGE", key, 0, 32) != str(self._probes).encode():
            raise Unavailable(
                f"Redis at {self._where} returned an older value than the last written one"
            )

    async def _call(self, *words: str | int) -> Any:
        async with self._bounded():
            return await self._client.execute_command(*words)  # type: ignore[no-untyped-call]

    async def _call_all(self, commands: Iterable[Command], *, raises: bool = True) -> list[Any]:
        """Sends the commands on one connection, within one timeout. With `raises` False, an error
        that Redis answers is in the list.
        """
        async with self._bounded(), self._client.pipeline(transaction=False) as pipe:
            for words in commands:
                pipe.execute_command(*words)
            answers: list[Any] = await pipe.execute(raise_on_error=raises)
        return answers

    async def _confirmed_call(self, replicas: int, *words: str | int) -> Any:
        """Sends a command that writes. Raises Unavailable also if fewer than `replicas` replicas
        confirm the write in half the timeout.
        """
        if not replicas:
            return await self._call(*words)
        seconds = TIMEOUT_S / 2
        # WAIT covers only the writes of its own connection.
        answer, confirmed = await self._call_all([words, ("WAIT", replicas, millis(seconds))])
        if confirmed < replicas:
            raise Unavailable(
                f"Redis at {self._where}: {confirmed} replicas confirmed the lease within "
                f"{seconds:g} s, and redis.confirm_replicas requires {replicas}"
            )
        return answer

    async def _messages(self, channel: str) -> AsyncIterator[None]:
        """Yields once for each message on the channel, endlessly. Raises Unavailable when Redis
        does not serve the subscription, or stops serving it.
        """
        async with self._client.pubsub(ignore_subscribe_messages=True) as subscription:
            async with self._bounded():
                await subscription.subscribe(channel)
            try:
                async for _ in subscription.listen():
                    yield
            except (RedisError, OSError) as error:
                raise self._unavailable(error) from error

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(TIMEOUT_S), self._slots:
                yield
        except TimeoutError:
            raise Unavailable(f"Redis at {self._where}: no answer within {TIMEOUT_S:g} s") from None
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> Unavailable:
        return Unavailable(f"Redis at {self._where}: {str(error) or type(error).__name__}")


def millis(seconds: float) -> int:
    """Returns the duration in milliseconds for Redis, at least 1."""
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
