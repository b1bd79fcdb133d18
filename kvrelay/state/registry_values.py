"""Reads and writes of the registry's values. Values in Redis are untrusted input: one that does not
parse is skipped with one warning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from kvrelay.errors import InvalidArgument
from kvrelay.process.telemetry import get_logger
from kvrelay.state.redis_connection import RedisConnection, millis
from kvrelay.state.registry_codec import MAX_VALUE_BYTES, check_name, decode, encode

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_WARNINGS_KEPT = 1000

T = TypeVar("T", bound="DataclassInstance")
log = get_logger("registry")


class RegistryValues(RedisConnection):
    """A connection that encodes what it writes and checks what it reads."""

    def __init__(self, url: str, namespace: str) -> None:
        super().__init__(url, namespace)
        # Key -> the problem with its value that was logged last.
        self._warned: dict[str, str] = {}

    async def _publish(self, key: str, value: DataclassInstance, ttl_s: float) -> None:
        await self._call("SET", key, encoded(value), "PX", millis(ttl_s))

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
        reads = (("GETRANGE", key, 0, MAX_VALUE_BYTES) for key in names)
        answers = await self._call_all(reads, raises=False)
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


def encoded(value: DataclassInstance) -> str:
    """Encodes a value. Raises InvalidArgument for a value that readers would skip."""
    try:
        return encode(value)
    except ValueError as error:
        raise InvalidArgument(f"{type(value).__name__.lstrip('_')}: {error}") from None


def valid_name(name: str) -> str:
    """Returns the name of a worker or an owner. Raises InvalidArgument for any other text."""
    try:
        return check_name(name)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
