"""As much of Redis as kvrelay.state.registry asks for, in virtual time;
`tests/simulation/test_fake_redis.py` compares it with a real one."""

from __future__ import annotations

import asyncio
import copy
import fnmatch
import json
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, ResponseError
from simulation.history import Act
from simulation.network import Network
from simulation.virtual_loop import current_process

from kvrelay.state import registry_scripts as scripts

NAME = "redis"
_WRITES = {"INCR", "EVAL", "HSET", "LPUSH", "LTRIM", "SADD", "SREM", "SET", "DEL"}
_OF_THE_PRIMARY = _WRITES | {"WAIT"}  # which asks about the writes of its own connection


class Store:
    """The server's data. Values are bytes, hashes, lists and sets; time is an argument's."""

    def __init__(self) -> None:
        self.values: dict[bytes, Any] = {}
        self.expiry: dict[bytes, float] = {}
        self.acts: list[Act] = []  # of leaders, whatever was lost since
        self.replicas = 1  # that have all writes

    def fork(self) -> Store:
        """What a replica knows that gets nothing new from now on."""
        other = Store()
        other.values, other.expiry, other.acts = (
            copy.deepcopy(self.values),
            dict(self.expiry),
            self.acts,
        )
        return other

    def execute(self, words: tuple[str | int, ...], now: float) -> Any:
        for key in [key for key, at in self.expiry.items() if now >= at]:
            self._delete(key)
        name, *rest = words
        return getattr(self, f"_{str(name).lower()}")(*(_bytes(word) for word in rest), now=now)

    def flush(self) -> None:
        self.values.clear()
        self.expiry.clear()

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

    def _publish(self, channel: bytes, message: bytes, *, now: float) -> int:
        return 0  # nobody listens: routers poll

    def _del(self, key: bytes, *, now: float) -> int:
        return self._delete(key)

    def _scan(
        self, cursor: bytes, _match: bytes, pattern: bytes, _count: bytes, _n: bytes, *, now: float
    ) -> Any:
        return [
            0,
            [key for key in self.values if fnmatch.fnmatchcase(key.decode(), pattern.decode())],
        ]

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

    # The scripts of kvrelay.state.registry_scripts, said again

    def _eval(self, script: bytes, _keys: bytes, *words: bytes, now: float) -> Any:
        return {
            scripts.PUBLISH_WORKER: self._publish_worker,
            scripts.NEXT_EPOCH: self._next_epoch,
            scripts.NEXT_NAME: self._next_name,
            scripts.REMOVE_WORKER: self._remove_worker,
            scripts.SCALE: self._scale,
            scripts.RESTORE_SIZES: self._restore_sizes,
            scripts.SET_SIZES: self._set_sizes,
            scripts.RECORD_DECISION: self._record_decision,
            scripts.RENEW_LEASE: self._renew_lease,
            scripts.RELEASE_LEASE: self._release_lease,
        }[script.decode()](*words, now=now)

    def _epoch_of(self, key: bytes) -> float | None:
        try:
            epoch = json.loads(self.values.get(key, b""))["value"]["epoch"]
        except (ValueError, TypeError, KeyError):
            return None
        return epoch if isinstance(epoch, int | float) else None

    def _publish_worker(
        self,
        entry: bytes,
        counter: bytes,
        terms: bytes,
        names: bytes,
        epoch: bytes,
        value: bytes,
        millis: bytes,
        term: bytes,
        role: bytes,
        number: bytes,
        now: float,
    ) -> Any:
        old = self._epoch_of(entry)
        if old is not None and old > int(epoch):
            return int(old)
        self._set(entry, value, b"PX", millis, now=now)
        if int(self._get(counter, bytes) or 0) < int(epoch):
            self.values[counter] = epoch
        if _number(self.values.get(terms)) < int(term):
            self.values[terms] = term
        table = self.values.setdefault(names, {}) if role else None
        if isinstance(table, dict) and _number(table.get(role)) <= int(number):
            table[role] = str(int(number) + 1).encode()
        return None

    def _next_epoch(
        self,
        counter: bytes,
        leader: bytes,
        last: bytes,
        least: bytes,
        owner: bytes,
        term: bytes,
        now: float,
    ) -> int:
        lease = self.values.get(leader)
        other = owner and isinstance(lease, dict) and lease.get(b"owner", owner) != owner
        if other and _number(lease.get(b"term")) >= int(term):
            return 0
        number = max(_number(self.values.get(counter)), int(last), int(least)) + 1
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

    def _leads(self, leader: bytes, owner: bytes, term: bytes) -> bool:
        lease = self.values.get(leader)
        return isinstance(lease, dict) and (lease.get(b"owner"), lease.get(b"term")) == (
            owner,
            term,
        )

    def _scale(
        self, leader: bytes, sizes: bytes, owner: bytes, term: bytes, *changes: bytes, now: float
    ) -> int:
        if not self._leads(leader, owner, term):
            return 0
        table = self._get(sizes, dict) or {}
        pools = list(zip(changes[::3], changes[1::3], changes[2::3], strict=True))
        if any(table.get(pool) != before for pool, before, _ in pools):
            return 0
        table.update((pool, after) for pool, _, after in pools)
        self.acts.append(Act(now, owner.decode(), int(term), "scale"))
        return 1

    def _restore_sizes(
        self, leader: bytes, sizes: bytes, owner: bytes, term: bytes, *words: bytes, now: float
    ) -> int:
        if not self._leads(leader, owner, term):
            return 0
        self._hset(sizes, *words, now=now)
        self.acts.append(Act(now, owner.decode(), int(term), "restore sizes"))
        return 1

    def _set_sizes(
        self, sizes: bytes, key: bytes, last: bytes, pools: bytes, *words: bytes, now: float
    ) -> None:
        count = 2 * int(pools)
        self._hset(sizes, *words[:count], now=now)
        for decision in words[count:]:
            self._lpush(key, decision, now=now)
        self._ltrim(key, b"0", last, now=now)

    def _record_decision(
        self,
        leader: bytes,
        key: bytes,
        owner: bytes,
        term: bytes,
        decision: bytes,
        last: bytes,
        now: float,
    ) -> int:
        if not self._leads(leader, owner, term):
            return 0
        self._lpush(key, decision, now=now)
        self._ltrim(key, b"0", last, now=now)
        return 1

    def _renew_lease(
        self,
        leader: bytes,
        terms: bytes,
        owner: bytes,
        seen: bytes,
        old_owner: bytes,
        old_term: bytes,
        old_beat: bytes,
        now: float,
    ) -> list[Any]:
        lease = self.values.get(leader)
        held, term, beat = b"", 0, 0
        if isinstance(lease, dict) and _number(lease.get(b"term")) > 0:
            held, term, beat = lease[b"owner"], _number(lease[b"term"]), _number(lease[b"beat"])
        highest = max(_number(self.values.get(terms)), int(seen), term)
        if held != owner:
            if held and (held, term, beat) != (old_owner, int(old_term), int(old_beat)):
                return [held, term, beat]
            term, beat = highest + 1, 0
        elif highest > term:
            term = highest + 1
        beat += 1
        words = {b"schema": 1, b"owner": owner, b"term": term, b"beat": beat}
        self._delete(leader)
        self.values[leader] = {key: _bytes(value) for key, value in words.items()}
        self.values[terms] = str(term).encode()
        return [owner, term, beat]

    def _release_lease(self, leader: bytes, owner: bytes, now: float) -> None:
        lease = self.values.get(leader)
        if isinstance(lease, dict) and lease.get(b"owner") == owner:
            self._delete(leader)

    def _wait(self, replicas: bytes, millis: bytes, *, now: float) -> int:
        return self.replicas


def _number(word: object) -> int:
    """As `number` of the scripts."""
    if not isinstance(word, bytes) or not word.isdigit() or int(word) >= 2**53:
        return 0
    return int(word)


def _bytes(word: str | int | bytes) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()


class FakeRedis:
    """One server in a simulation.

    `state`: ok, down (refuses), stalled (is silent), read-only, stale (reads are answered as `past`
    was), or flaky (some commands are carried out twice, as clients repeat them when a connection is
    lost).
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.store = Store()
        self.state = "ok"
        self.past = Store(), 0.0  # what a replica that got stuck knows, and its time
        # Clients that still talk to an earlier primary, which is another one
        self.left_behind: dict[str, Store] = {}

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
        store, now = server.left_behind.get(self._name, server.store), server.network.loop.time()
        if server.state == "stale" and words[0] not in _OF_THE_PRIMARY:
            store, now = server.past
        try:
            if server.state == "flaky" and server.network.rng.random() < 0.3:
                store.execute(words, now)
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
        for answer in answers:
            if raise_on_error and isinstance(answer, Exception):
                raise answer
        return answers
