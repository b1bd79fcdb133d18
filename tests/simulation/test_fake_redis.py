"""The stand-in for Redis says what a real one says."""

from __future__ import annotations

import random
from typing import Any

import pytest
import redis.asyncio
from simulation.fake_redis import Store

from kvrelay.state import registry_scripts as scripts
from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.state.registry_codec import encode
from kvrelay.types.workers import WorkerInfo

ROUNDS = 3000
OWNERS = ("a", "b")


def _entry(name: str, epoch: int) -> str:
    return encode(
        WorkerInfo(name, "decode", epoch, "ready", "127.0.0.1:1", "m", "l", 4, 4, "h", 96)
    )


def _command(rng: random.Random) -> tuple[str | int, ...]:
    name, epoch = rng.choice(("d0", "d1")), rng.randrange(1, 6)
    key, ttl = f"kvrelay:worker:{name}", 3_600_000
    token = rng.randrange(1, 6)
    owner, other, leader = (
        rng.choice(OWNERS),
        rng.choice(OWNERS),
        ("kvrelay:leader", "kvrelay:term"),
    )
    claim = (owner, token)
    return rng.choice(
        [
            ("INCR", "kvrelay:epoch"),
            (
                "EVAL",
                scripts.NEXT_EPOCH,
                2,
                "kvrelay:epoch",
                leader[0],
                rng.randrange(6),
                rng.randrange(6),
                *claim,
            ),
            (
                "EVAL",
                scripts.NEXT_EPOCH,
                2,
                "kvrelay:epoch",
                leader[0],
                rng.randrange(6),
                rng.randrange(6),
                "",
                0,
            ),
            (
                "EVAL",
                scripts.PUBLISH_WORKER,
                4,
                key,
                "kvrelay:epoch",
                leader[1],
                "kvrelay:names",
                epoch,
                _entry(name, epoch),
                ttl,
                token,
                rng.choice(("", "prefill", "decode")),
                rng.randrange(6),
            ),
            (
                "EVAL",
                scripts.NEXT_NAME,
                1,
                "kvrelay:names",
                rng.choice(("prefill", "decode")),
                rng.randrange(4),
            ),
            ("SET", "kvrelay:names", "junk", "PX", ttl),
            ("EVAL", scripts.REMOVE_WORKER, 1, key, epoch),
            ("EVAL", scripts.RENEW_LEASE, 2, *leader, owner, token, "", 0, 0),
            (
                "EVAL",
                scripts.RENEW_LEASE,
                2,
                *leader,
                owner,
                token,
                other,
                rng.randrange(9),
                rng.randrange(1, 3),
            ),
            ("EVAL", scripts.RELEASE_LEASE, 1, leader[0], owner),
            ("SET", rng.choice(leader), "junk", "PX", ttl),
            ("DEL", leader[1]),
            ("HSET", "kvrelay:fixed", "schema", 1, "owner", owner, "term", token, "beat", 1),
            (
                "EVAL",
                scripts.SCALE,
                2,
                "kvrelay:fixed",
                "kvrelay:desired",
                *claim,
                "decode",
                token,
                token + 1,
            ),
            (
                "EVAL",
                scripts.SCALE,
                2,
                "kvrelay:fixed",
                "kvrelay:desired",
                *claim,
                "decode",
                1,
                5,
                "prefill",
                token,
                2,
            ),
            (
                "EVAL",
                scripts.RESTORE_SIZES,
                2,
                "kvrelay:fixed",
                "kvrelay:desired",
                *claim,
                "prefill",
                token,
            ),
            (
                "EVAL",
                scripts.SET_SIZES,
                2,
                "kvrelay:desired",
                "kvrelay:decisions",
                2,
                1,
                "decode",
                token,
                *rng.choices(["first", "second"], k=rng.randrange(3)),
            ),
            (
                "EVAL",
                scripts.RECORD_DECISION,
                2,
                "kvrelay:fixed",
                "kvrelay:decisions",
                *claim,
                token,
                2,
            ),
            ("WAIT", 0, 1),
            ("HSET", "kvrelay:desired", "decode", token),
            ("HGETALL", "kvrelay:desired"),
            ("LPUSH", "kvrelay:decisions", token),
            ("LTRIM", "kvrelay:decisions", 0, 2),
            ("LRANGE", "kvrelay:decisions", 0, 9),
            ("SADD", "kvrelay:drains", name),
            ("SREM", "kvrelay:drains", name),
            ("SMEMBERS", "kvrelay:drains"),
            ("SET", "kvrelay:router:r", "x", "PX", ttl),
            ("SET", key, rng.choice(("junk", "{}", '{"value": 3}')), "PX", ttl),
            ("DEL", "kvrelay:router:r"),
            ("GETRANGE", key, 0, 65536),
            ("SCAN", 0, "MATCH", "kvrelay:worker:*", "COUNT", 1000),
            ("PING",),
        ]
    )


def _plain(answer: Any) -> Any:
    if isinstance(answer, set):
        return sorted(answer)
    if isinstance(answer, list | tuple) and answer and isinstance(answer[-1], list):
        return [int(answer[0]), sorted(answer[1])]  # of a scan
    if isinstance(answer, bool):
        return "yes"  # of PING, SET and LTRIM, as redis-py reads them
    return answer


@pytest.mark.long
async def test_every_command_is_answered_as_a_real_server_does() -> None:
    rng, store = random.Random(1), Store()
    store.replicas = 0
    async with EmbeddedRedis() as server:
        client = redis.asyncio.Redis.from_url(server.url)
        try:
            for number in range(ROUNDS):
                command = _command(rng)
                theirs = _plain(await client.execute_command(*command))
                ours = _plain(store.execute(command, 0.0))
                if theirs == "yes":
                    ours = "yes" if ours in (b"OK", b"PONG") else ours
                assert ours == theirs, f"command {number}: {command}"
        finally:
            await client.aclose()


def test_values_end_with_their_time() -> None:
    store = Store()
    store.execute(("SET", "a", "x", "PX", 1000), 10.0)
    assert store.execute(("GETRANGE", "a", 0, 9), 10.9) == b"x"
    assert store.execute(("GETRANGE", "a", 0, 9), 11.0) == b""
