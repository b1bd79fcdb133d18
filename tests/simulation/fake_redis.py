"""As much of Redis as kvrelay.registry asks for, in virtual time; `tests/simulation/test_fake_redis.py` compares it
with a real one."""

from __future__ import annotations

import asyncio
import fnmatch
import json
from dataclasses import replace
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, ResponseError
from simulation.history import Reign
from simulation.network import Network
from simulation.virtual_loop import current_process

from kvrelay import registry_scripts as scripts

NAME = "redis"
_WRITES = {"INCR", "EVAL", "HSET", "LPUSH", "LTRIM", "SADD", "SREM", "SET", "DEL"}


class Store:
    """The server's data. Values are bytes, hashes, lists and sets; time is an argument's."""

    def __init__(self) -> None:
        self.values: dict[bytes, Any] = {}
        self.expiry: dict[bytes, float] = {}
        self.reigns: list[Reign] = []  # since the last flush
        self.scalings: list[int] = []  # tokens of those who set a size since then

    def execute(self, words: tuple[str | int, ...], now: float) -> Any:
        for key in [key for key, at in self.expiry.items() if now >= at]:
            self._delete(key)
        name, *rest = words
        return getattr(self, f"_{str(name).lower()}")(*(_bytes(word) for word in rest), now=now)

    def flush(self) -> None:
        self.values.clear()
        self.expiry.clear()
        self.reigns.clear()
        self.scalings.clear()

    def _get(self, key: bytes, kind: type) -> Any:
        value = self.values.get(key)
        if value is not None and not isinstance(value, kind):
            raise ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def _delete(self, key: bytes) -> int:
        self.expiry.pop(key, None)
        return int(self.values.pop(key, None) is not None)

    def _ping(self, *, now: float) -> bytes:
        return b"PONG"

    def _incr(self, key: bytes, *, now: float) -> int:
        number = int(self._get(key, bytes) or 0) + 1
        self.values[key] = str(number).encode()
        return number

    def _set(self, key: bytes, value: bytes, px: bytes, millis: bytes, *, now: float) -> bytes:
        self.values[key] = value
        self.expiry[key] = now + int(millis) / 1000
        return b"OK"

    def _getrange(self, key: bytes, start: bytes, end: bytes, *, now: float) -> bytes:
        value: bytes = self._get(key, bytes) or b""
        return value[int(start) : int(end) + 1]

    def _del(self, key: bytes, *, now: float) -> int:
        return self._delete(key)

    def _scan(self, cursor: bytes, _match: bytes, pattern: bytes, _count: bytes, _n: bytes, *, now: float) -> Any:
        return [0, [key for key in self.values if fnmatch.fnmatchcase(key.decode(), pattern.decode())]]

    def _hgetall(self, key: bytes, *, now: float) -> dict[bytes, bytes]:
        return dict(self._get(key, dict) or {})

    def _hset(self, key: bytes, *words: bytes, now: float) -> int:
        table = self._get(key, dict)
        if table is None:
            table = self.values[key] = {}
        before = len(table)
        table.update(zip(words[::2], words[1::2], strict=True))
        return len(table) - before

    def _lpush(self, key: bytes, value: bytes, *, now: float) -> int:
        self.values[key] = [value, *(self._get(key, list) or [])]
        return len(self.values[key])

    def _ltrim(self, key: bytes, start: bytes, end: bytes, *, now: float) -> bytes:
        if key in self.values:
            self.values[key] = self._get(key, list)[int(start) : int(end) + 1]
        return b"OK"

    def _lrange(self, key: bytes, start: bytes, end: bytes, *, now: float) -> list[bytes]:
        return list((self._get(key, list) or [])[int(start) : int(end) + 1])

    def _sadd(self, key: bytes, *new: bytes, now: float) -> int:
        members = self._get(key, set)
        if members is None:
            members = self.values[key] = set()
        before = len(members)
        members.update(new)
        return len(members) - before

    def _srem(self, key: bytes, member: bytes, *, now: float) -> int:
        members = self._get(key, set) or set()
        found = member in members
        members.discard(member)
        if not members:
            self._delete(key)
        return int(found)

    def _smembers(self, key: bytes, *, now: float) -> set[bytes]:
        return set(self._get(key, set) or ())

    # The scripts of kvrelay.registry_scripts, said again

    def _eval(self, script: bytes, _keys: bytes, *words: bytes, now: float) -> Any:
        return {
            scripts.PUBLISH_WORKER: self._publish_worker,
            scripts.NEXT_EPOCH: self._next_epoch,
            scripts.NEXT_NAME: self._next_name,
            scripts.REMOVE_WORKER: self._remove_worker,
            scripts.SCALE: self._scale,
            scripts.ACQUIRE_LEADER: self._acquire_leader,
            scripts.RELEASE_LEADER: self._release_leader,
        }[script.decode()](*words, now=now)

    def _epoch_of(self, key: bytes) -> float | None:
        try:
            epoch = json.loads(self.values.get(key, b""))["value"]["epoch"]
        except (ValueError, TypeError, KeyError):
            return None
        return epoch if isinstance(epoch, int | float) else None

    def _publish_worker(
        self, entry: bytes, counter: bytes, epoch: bytes, value: bytes, millis: bytes, now: float
    ) -> Any:
        old = self._epoch_of(entry)
        if old is not None and old > int(epoch):
            return int(old)
        self._set(entry, value, b"PX", millis, now=now)
        if int(self._get(counter, bytes) or 0) < int(epoch):
            self.values[counter] = epoch
        return None

    def _next_epoch(self, counter: bytes, last: bytes, now: float) -> int:
        number = max(int(self.values.get(counter, 0)), int(last)) + 1
        self.values[counter] = str(number).encode()
        return number

    def _next_name(self, names: bytes, pool: bytes, least: bytes, now: float) -> int:
        if not isinstance(self.values.get(names, {}), dict):
            self._delete(names)
        table = self.values.setdefault(names, {})
        number = max(int(table.get(pool, 0)), int(least))
        table[pool] = str(number + 1).encode()
        return number

    def _remove_worker(self, entry: bytes, epoch: bytes, now: float) -> None:
        if self._epoch_of(entry) == int(epoch):
            self._delete(entry)

    def _scale(self, sizes: bytes, counter: bytes, token: bytes, *changes: bytes, now: float) -> int:
        table = self._get(sizes, dict) or {}
        pools = list(zip(changes[::3], changes[1::3], changes[2::3], strict=True))
        if any(table.get(pool) != before for pool, before, _ in pools):
            return 0
        if int(self._get(counter, bytes) or 0) > int(token):
            return 0
        table.update((pool, after) for pool, _, after in pools)
        self.scalings.append(int(token))
        return 1

    def _acquire_leader(self, key: bytes, counter: bytes, owner: bytes, millis: bytes, now: float) -> int | None:
        leader = self.values.get(key)
        token = int(leader[b"token"]) if isinstance(leader, dict) and b"token" in leader else None
        if token is not None and leader[b"owner"] != owner:
            return None
        if token is None:
            token = self._incr(counter, now=now)
            self.values[key] = {b"schema": b"1", b"owner": owner, b"token": str(token).encode()}
        self.expiry[key] = now + int(millis) / 1000
        self.reigns.append(Reign(owner.decode(), token, now, self.expiry[key]))
        return token

    def _release_leader(self, key: bytes, owner: bytes, now: float) -> None:
        if (self._get(key, dict) or {}).get(b"owner") == owner:
            self._delete(key)
            self.reigns[-1] = replace(self.reigns[-1], until=now)


def _bytes(word: str | int | bytes) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()


class FakeRedis:
    """One server in a simulation.

    `state`: ok, down (refuses), stalled (is silent), read-only, or stale (reads are answered as `past` was).
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.store = Store()
        self.state = "ok"
        self.past = Store(), 0.0  # what a replica that got stuck knows, and its time

    def client(self, *_: object, **__: object) -> Client:
        """In place of redis.asyncio.Redis.from_url."""
        return Client(self, current_process().name)


class Client:
    """redis.asyncio.Redis, of one process."""

    def __init__(self, server: FakeRedis, name: str) -> None:
        self._server = server
        self._name = name

    async def aclose(self) -> None:
        pass

    async def execute_command(self, *words: str | int) -> Any:
        await self._there()
        answer = self._execute(words)
        await self._back()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def pipeline(self, *, transaction: bool) -> Pipeline:
        return Pipeline(self)

    async def _there(self) -> None:
        server = self._server
        await asyncio.sleep(server.network.latency(self._name, NAME))
        if server.state == "down":
            raise RedisConnectionError("Connection refused")
        if server.state == "stalled" or server.network.is_cut(self._name, NAME):
            await asyncio.sleep(3600)

    async def _back(self) -> None:
        await asyncio.sleep(self._server.network.latency(NAME, self._name))
        if self._server.network.is_cut(NAME, self._name):
            await asyncio.sleep(3600)
        if self._server.state == "down":
            raise RedisConnectionError("Connection closed by server")

    def _execute(self, words: tuple[str | int, ...]) -> Any:
        server = self._server
        if server.state == "read-only" and words[0] in _WRITES:
            return ReadOnlyError("You can't write against a read only replica.")
        store, now = server.store, server.network.loop.time()
        if server.state == "stale" and words[0] not in _WRITES:
            store, now = server.past
        try:
            return store.execute(words, now)
        except ResponseError as error:
            return error


class Pipeline:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._commands: list[tuple[str | int, ...]] = []

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def execute_command(self, *words: str | int) -> None:
        self._commands.append(words)

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        await self._client._there()
        answers = [self._client._execute(words) for words in self._commands]
        await self._client._back()
        return answers
