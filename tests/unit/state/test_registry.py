from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvrelay.errors import ConfigError, FailedPrecondition, InvalidArgument, Unavailable
from kvrelay.state import redis_connection
from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.state.registry import Registry
from kvrelay.state.registry_codec import check_address, decode, encode
from kvrelay.types.control_plane import (
    Claim,
    ControllerInfo,
    LeaseRecord,
    RouterLoad,
    ScalingDecision,
)
from kvrelay.types.workers import POOLS, PoolName, WorkerInfo, WorkerLoad


def worker(
    worker_id: str = "decode-0", epoch: int = 1, pool: PoolName = "decode", **changes: object
) -> WorkerInfo:
    info = WorkerInfo(
        worker_id=worker_id,
        pool=pool,
        epoch=epoch,
        state="ready",
        address="127.0.0.1:7001",
        model_id="demo",
        layout_hash="00ff",
        block_size=16,
        block_bytes=4096,
        host_id="host",
        max_model_len=4096,
        load=WorkerLoad(running=2, waiting=1, tokens_per_second=12.5),
    )
    return dataclasses.replace(info, **changes)  # type: ignore[arg-type]


async def _eventually(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(60):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.01)


async def leads(registry: Registry, owner: str) -> Claim:
    record = await registry.renew_lease(owner, 0)
    assert record.owner == owner
    return Claim(owner, record.term)


async def _no_workers(registry: Registry) -> bool:
    return await registry.workers() == ()


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedRedis]:
    async with EmbeddedRedis() as running:
        yield running


@pytest.fixture
async def registry(server: EmbeddedRedis) -> AsyncIterator[Registry]:
    async with await Registry.connect(server.url) as connected:
        yield connected


async def test_epochs_are_unique_over_concurrent_callers(
    server: EmbeddedRedis, registry: Registry
) -> None:
    async with await Registry.connect(server.url) as other:
        epochs = await asyncio.gather(*((registry, other)[i % 2].next_epoch() for i in range(50)))
    assert len(set(epochs)) == 50


async def test_workers_come_back_as_published_and_by_id(registry: Registry) -> None:
    for name in ("decode-1", "prefill-0", "decode-0"):
        await registry.publish_worker(worker(name))
    assert await registry.workers() == (worker("decode-0"), worker("decode-1"), worker("prefill-0"))


async def test_many_calls_at_once_take_few_connections(
    server: EmbeddedRedis, registry: Registry
) -> None:
    async with redis.asyncio.Redis.from_url(server.url) as client:
        taken = len(await client.client_list())
        await client.config_set("maxclients", taken + redis_connection.MAX_CALLS + 8)
    infos = [worker(f"decode-{number}") for number in range(500)]
    await asyncio.gather(*(registry.publish_worker(one, ttl_s=60.0) for one in infos))
    assert len(await registry.workers()) == len(infos)


async def test_an_entry_expires_without_heartbeat(registry: Registry) -> None:
    await registry.publish_worker(worker(), ttl_s=0.01)
    await _eventually(lambda: _no_workers(registry))


async def test_an_older_incarnation_cannot_overwrite_or_remove_a_later_one(
    registry: Registry,
) -> None:
    await registry.publish_worker(worker(epoch=7))
    with pytest.raises(FailedPrecondition, match="epoch 6 was replaced by epoch 7"):
        await registry.publish_worker(worker(epoch=6))
    await registry.remove_worker("decode-0", 6)
    assert await registry.workers() == (worker(epoch=7),)
    await registry.publish_worker(worker(epoch=8))
    await registry.remove_worker("decode-0", 8)
    assert await registry.workers() == ()


async def test_epochs_stay_unique_after_redis_lost_everything(registry: Registry) -> None:
    epochs = [await registry.next_epoch() for _ in range(3)]
    await registry._call("FLUSHALL")
    # The next heartbeat of a worker that lived on, from a controller whose clock was ahead
    ahead = epochs[-1] + 10**12
    await registry.publish_worker(worker(epoch=ahead))
    assert await registry.next_epoch() > ahead
    await registry._call("FLUSHALL")
    future = epochs[-1] + 10**9
    assert await registry.next_epoch(future) == future + 1, (
        "as a worker says that had it in another pool"
    )


def _entry(**changes: object) -> str:
    record = json.loads(encode(worker()))
    record["value"] |= changes
    return json.dumps(record)


JUNK = {
    "not JSON": "\x80\x04junk",
    "not an object": "[]",
    "no value": '{"schema": 1}',
    "future schema": json.dumps({"schema": 2, "value": {"anything": 1}}),
    "missing field": '{"schema": 1, "value": {"worker_id": "decode-0"}}',
    "wrong type": _entry(epoch="1"),
    "fraction": _entry(block_size=16.5),
    "negative": _entry(epoch=-1),
    "blocks of no tokens": _entry(block_size=0),
    "no context": _entry(max_model_len=0),
    "too large": _entry(block_size=2**31),
    "endless": _entry(epoch=2**63),
    "beyond a float": _entry(pid=10**400),
    "far below zero": _entry(pid=-(10**400)),
    "beyond Python's digits": _entry().replace('"pid": ', '"pid": ' + "9" * 5000),
    "a load beyond a float": _entry(load={"tokens_per_second": 10**400}),
    "not a number": _entry(load={"tokens_per_second": float("nan")}),
    "negative load": _entry(load={"running": -5}),
    "unknown pool": _entry(pool="encode"),
    "unknown state": _entry(state="dead"),
    "no port": _entry(address="127.0.0.1"),
    "long address": _entry(address="ж" * 500),
    "port 0": _entry(address="127.0.0.1:0"),
    "port too large": _entry(address="127.0.0.1:65536"),
    "port of other digits": _entry(address="127.0.0.1:１２"),
    "host name": _entry(address="evil.example:80"),
    "public address": _entry(address="8.8.8.8:80"),
    "any address": _entry(address="0.0.0.0:80"),
    "a cloud's metadata": _entry(address="169.254.169.254:80"),
    "link-local": _entry(address="[fe80::1]:80"),
    "multicast": _entry(address="224.0.0.1:80"),
    "broadcast": _entry(address="255.255.255.255:80"),
    "documentation": _entry(address="192.0.2.1:80"),
    "public address as IPv6": _entry(address="[::ffff:8.8.8.8]:80"),
    "ANSI in an address": _entry(address="127.0.0.1:1\x1b[2J"),
    "ANSI in an id": _entry(worker_id="\x1b[31mdecode-0"),
    "ANSI in a name": _entry(model_id="\x1b[2Jdemo"),
    "newline in a name": _entry(host_id="a\nb"),
    "another's entry": _entry(worker_id="decode-9"),
    "long text": _entry(model_id="m" * 1000),
    "deep nesting": "[" * 60_000,
    "too long": '{"schema": 1, "pad": "' + "x" * 70_000 + '"}',
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK.keys())
async def test_junk_is_skipped_with_one_warning(registry: Registry, junk: str) -> None:
    await registry.publish_worker(worker("prefill-0", pool="prefill"))
    await registry._call("SET", "kvrelay:worker:decode-0", junk)
    with capture_logs() as logs:
        for _ in range(3):
            assert [info.worker_id for info in await registry.workers()] == ["prefill-0"]
    assert [(line["log_level"], line["key"]) for line in logs] == [
        ("warning", "'kvrelay:worker:decode-0'")
    ]
    assert all(line["reason"].isprintable() and len(line["reason"]) < 600 for line in logs)


async def test_a_key_of_another_type_or_with_control_characters_is_skipped(
    registry: Registry,
) -> None:
    await registry._call("RPUSH", "kvrelay:worker:list", "x")
    await registry._call("SET", "kvrelay:worker:\x1b[31m", encode(worker()))
    with capture_logs() as logs:
        assert await registry.workers() == ()
    assert len(logs) == 2
    assert all(line["key"].isprintable() for line in logs)


async def test_a_rightful_worker_replaces_junk(registry: Registry) -> None:
    for junk in ("{", '{"value": 3}', '{"value": {"epoch": "x"}}'):
        await registry._call("SET", "kvrelay:worker:decode-0", junk)
        await registry.publish_worker(worker())
        assert await registry.workers() == (worker(),)
    await registry._call("DEL", "kvrelay:worker:decode-0")
    await registry._call("RPUSH", "kvrelay:worker:decode-0", "x")
    await registry.remove_worker("decode-0", 1)
    await registry.publish_worker(worker())
    assert await registry.workers() == (worker(),)


@pytest.mark.parametrize(
    "bad",
    [{"worker_id": "a b"}, {"address": "host:1"}, {"model_id": "\x00"}, {"epoch": -1}],
    ids=str,
)
async def test_nobody_publishes_what_nobody_would_read(
    registry: Registry, bad: dict[str, object]
) -> None:
    with pytest.raises(InvalidArgument, match="WorkerInfo: "):
        await registry.publish_worker(worker(**bad))  # type: ignore[arg-type]


async def test_free_text_is_made_printable(registry: Registry) -> None:
    broken = WorkerLoad(integrity_ok=False, integrity_error="free 3\n\x1b[31mheld 2")
    await registry.publish_worker(worker(load=broken))
    (info,) = await registry.workers()
    assert info.load.integrity_error == "free 3  [31mheld 2"


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any message will do
        decode(WorkerInfo, raw)


@pytest.mark.parametrize(
    "good",
    ["localhost:1", "127.0.0.1:65535", "10.1.2.3:80", "100.64.0.1:80", "[::1]:5", "[fd00::1]:5"],
)
def test_private_addresses(good: str) -> None:
    assert check_address(good) == good


async def test_where_workers_listen_on_loopback_none_elsewhere_is_believed(
    server: EmbeddedRedis, registry: Registry
) -> None:
    """Who can write to Redis cannot lead a router on one machine to another one."""
    await registry.publish_worker(worker("decode-0", address="10.1.2.3:80"))
    await registry.publish_worker(worker("decode-1", address="[::1]:80"))
    assert len(await registry.workers()) == 2
    async with await Registry.connect(server.url, loopback_only=True) as local:
        with capture_logs() as logs:
            for _ in range(2):
                assert [info.worker_id for info in await local.workers()] == ["decode-1"]
    assert [line["reason"] for line in logs] == [
        "'address 10.1.2.3:80 is not a loopback address, but listen.worker_host is'"
    ]


async def test_desired_sizes(registry: Registry) -> None:
    assert await registry.desired() == {}
    await registry.set_desired({"prefill": 2, "decode": 3})
    await registry.set_desired({"decode": 4})
    assert await registry.desired() == {"prefill": 2, "decode": 4}
    await registry._call("HSET", "kvrelay:desired", "prefill", "many")
    with capture_logs() as logs:
        assert await registry.desired() == {"decode": 4}
    assert len(logs) == 1
    long = json.dumps({"schema": 1, "value": {"replicas": 9}, "more": "x" * 70_000})
    await registry._call("HSET", "kvrelay:desired", "prefill", long)
    assert await registry.desired() == {"decode": 4}


async def test_the_changes_of_operators_are_in_the_history(registry: Registry) -> None:
    many = [ScalingDecision(float(n), "decode", n, n + 1, "set by an operator") for n in range(300)]
    await registry.set_desired({"prefill": 2, "decode": 3}, many)
    assert await registry.desired() == {"prefill": 2, "decode": 3}
    found = await registry.decisions(1000)
    assert found == tuple(reversed(many))[: len(found)]
    assert 20 <= len(found) < 300, "old ones go"


async def test_scaling_is_fenced_and_never_overrides_an_operator(registry: Registry) -> None:
    await registry.set_desired({"decode": 1})
    old = await leads(registry, "a")
    assert await registry.scale({"decode": (1, 2)}, old)
    await registry.set_desired({"decode": 5})
    assert not await registry.scale({"decode": (2, 3)}, old), "the operator came between"
    await registry.release_lease("a")
    new = await leads(registry, "b")
    assert new.term > old.term
    assert not await registry.scale({"decode": (5, 6)}, old), "the old leader woke up"
    assert not await registry.scale({"decode": (5, 6)}, replace(new, owner="a")), (
        "the same term by another owner"
    )
    assert await registry.scale({"decode": (5, 4)}, new)
    assert await registry.desired() == {"decode": 4}


async def test_what_a_leader_writes_is_fenced(registry: Registry) -> None:
    old, decision = await leads(registry, "a"), ScalingDecision(1.0, "decode", 1, 2, "reason")
    await registry.release_lease("a")
    new = await leads(registry, "b")
    assert not await registry.restore_desired({"decode": 7}, old)
    assert not await registry.record_decision(decision, old)
    assert (await registry.desired(), await registry.decisions()) == ({}, ())
    assert await registry.restore_desired({"decode": 7}, new)
    assert await registry.record_decision(decision, new)
    assert (await registry.desired(), await registry.decisions()) == ({"decode": 7}, (decision,))


async def test_one_leader_at_a_time(registry: Registry) -> None:
    first = await registry.renew_lease("a", 0)
    assert first == LeaseRecord("a", 1, 1)
    assert await registry.renew_lease("b", 0) == first, "it is not free"
    assert await registry.renew_lease("a", 1) == LeaseRecord("a", 1, 2), "renewing keeps the term"
    assert await registry.renew_lease("b", 1, first) == LeaseRecord("a", 1, 2), (
        "it was renewed meanwhile"
    )
    await registry.release_lease("b")
    assert (await registry.renew_lease("b", 1)).owner == "a", "only its owner can give it back"
    assert await registry.renew_lease("b", 1, LeaseRecord("a", 1, 2)) == LeaseRecord("b", 2, 1), (
        "it has ended"
    )
    await registry.release_lease("b")
    assert await registry.renew_lease("a", 2) == LeaseRecord("a", 3, 1)


async def test_a_term_exceeds_all_that_anybody_knows(registry: Registry) -> None:
    assert (await registry.renew_lease("a", 41)).term == 42, "the owner"
    await registry._call("FLUSHALL")
    await registry.publish_worker(worker(term=50, started_by="z"))
    assert (await registry.renew_lease("b", 0)).term == 51, "a worker that lived on"
    await registry.publish_worker(worker(term=60, started_by="z"))
    assert (await registry.renew_lease("b", 51)).term == 61, "also after it was taken"
    await registry._call("DEL", "kvrelay:term")
    await registry.release_lease("b")
    assert (await registry.renew_lease("c", 0)).term == 1, "nobody knows of any"


async def test_a_worker_that_comes_up_after_its_controller_was_succeeded_is_refused(
    registry: Registry,
) -> None:
    old = await leads(registry, "a")
    assert await registry.next_epoch(0, old)
    await registry.release_lease("a")
    assert await registry.next_epoch(0, old), "nobody has the lease"
    new = await leads(registry, "b")
    for claim in (old, replace(new, owner="a")):
        with pytest.raises(
            FailedPrecondition, match=f"controller a started this worker in term {claim.term}"
        ):
            await registry.next_epoch(0, claim)
    assert await registry.next_epoch(0, new)
    assert await registry.next_epoch(0, Claim("c", new.term + 1)), "Redis has lost that lease"
    assert await registry.next_epoch(0), "an operator started it by hand"


async def test_epochs_that_redis_has_lost_are_not_given_again(registry: Registry) -> None:
    lost = [await registry.next_epoch() for _ in range(20)]
    await registry._call("FLUSHALL")
    assert await registry.next_epoch() not in lost


async def test_names_that_redis_has_lost_are_not_given_again(registry: Registry) -> None:
    """As far as their workers live: their heartbeats say so. A name with a controller's tag has no
    number that others count.
    """
    for junk in (None, "junk"):
        await registry._call("FLUSHALL")
        if junk is not None:
            await registry._call("SET", registry._keys.names, junk)
        for worker_id in ("decode-7", "decode-3", "prefill-5f0c9a1e-9", "decode-x", "standby-2"):
            await registry.publish_worker(worker(worker_id))
        given = [await registry.next_name(role, 0) for role in ("decode", "prefill", "standby")]
        if junk is None:
            assert given == ["decode-8", "prefill-0", "standby-3"]


@pytest.mark.parametrize("junk", ["junk", "-5", "1e400", "nan", "1.5", str(2**60)])
async def test_junk_in_the_lease_does_not_stop_scaling_for_good(
    registry: Registry, junk: str
) -> None:
    await registry._call("SET", "kvrelay:leader", junk)
    await registry._call("SET", "kvrelay:term", junk)
    assert await registry.renew_lease("a", 0) == LeaseRecord("a", 1, 1)
    await registry._call("HSET", "kvrelay:leader", "term", junk)
    assert (await registry.renew_lease("b", 1)).owner == "b"
    await registry._call("HSET", "kvrelay:leader", "beat", junk)
    assert (await registry.renew_lease("c", 1)).beat == 0
    await registry._call("DEL", "kvrelay:term", "kvrelay:leader")
    await registry._call("LPUSH", "kvrelay:leader", junk)
    await registry._call("LPUSH", "kvrelay:term", junk)
    assert await registry.renew_lease("c", 0) == LeaseRecord("c", 1, 1)


async def test_controllers(registry: Registry) -> None:
    info = ControllerInfo("host-1-aa", "leading", 3)
    await registry.publish_controller(info)
    assert await registry.controllers() == (info,)
    await registry.remove_controller("host-1-aa")
    assert await registry.controllers() == ()


@pytest.mark.long
async def test_a_lease_counts_once_enough_replicas_have_it(server: EmbeddedRedis) -> None:
    async with await Registry.connect(server.url, confirm_replicas=1) as registry:
        with pytest.raises(
            Unavailable,
            match=r"0 replicas confirmed .* "
            r"redis.confirm_replicas requires 1",
        ):
            await registry.renew_lease("a", 0)


async def test_drains(registry: Registry) -> None:
    await registry.request_drain("decode-1")
    await registry.request_drain("decode-2")
    await registry._call("SADD", "kvrelay:drains", "\x1b[0m")
    assert await registry.drains() == {"decode-1", "decode-2"}
    await registry.clear_requests("decode-1")
    assert await registry.drains() == {"decode-2"}
    with pytest.raises(InvalidArgument):
        await registry.request_drain("decode 1\n")


async def test_decisions_newest_first_and_capped(registry: Registry) -> None:
    made = [ScalingDecision(float(i), "decode", i, i + 1, f"reason {i}") for i in range(120)]
    claim = await leads(registry, "a")
    for decision in made:
        assert await registry.record_decision(decision, claim)
    await registry._call("LPUSH", "kvrelay:decisions", "junk")
    assert await registry.decisions(4) == tuple(reversed(made[-3:]))
    assert len(await registry.decisions(1000)) == 100


async def test_a_delayed_decision_by_pool(registry: Registry) -> None:
    made = [ScalingDecision(1.0, pool, 1, size, "why") for pool in POOLS for size in (2, 3)]
    for decision in made:
        await registry.publish_delayed(decision, 60.0)
    await registry._call("SET", "kvrelay:delayed:other", "junk")
    assert await registry.delayed() == (made[3], made[1])
    await registry.remove_delayed("decode")
    assert await registry.delayed() == (made[1],)


async def test_routers(registry: Registry) -> None:
    load = RouterLoad("router-0", running=1, waiting=3, waiting_tokens=300, ttft_p95_ms=12.5)
    await registry.publish_router(load)
    assert await registry.routers() == (load,)
    await registry.remove_router("router-0")
    assert await registry.routers() == ()


async def test_a_cancelled_call_stays_cancelled(registry: Registry) -> None:
    async def ask_for_ever() -> None:
        while True:
            await registry.desired()

    for turns in range(1, 40):
        asking = asyncio.create_task(ask_for_ever())
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        done, _ = await asyncio.wait({asking}, timeout=60)
        assert done, "the cancellation was lost"


async def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(Unavailable, match=f"Redis at 127.0.0.1:{port}"):
        await Registry.connect(f"redis://:secret@127.0.0.1:{port}/0")


async def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_connection, "TIMEOUT_S", 0.05)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(Unavailable, match=r"no answer within 0\.05 s") as caught,
    ):
        await Registry.connect(f"redis://:secret@127.0.0.1:{silent.getsockname()[1]}/0")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1", "127.0.0.1:6379", "redis://127.0.0.1:port"])
async def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url"):
        await Registry.connect(url)


async def test_a_read_only_redis_is_unavailable(registry: Registry) -> None:
    await registry._call("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(Unavailable, match="read only replica"):
        await registry.publish_worker(worker())


async def test_restarts(registry: Registry) -> None:
    await registry.request_restart([])
    assert await registry.restarts() == frozenset()
    await registry.request_restart(["decode-1", "prefill-0"])
    await registry.request_restart(["decode-1", "decode-2"])
    assert await registry.restarts() == {"decode-1", "decode-2", "prefill-0"}
    await registry.clear_requests("decode-1")
    assert await registry.restarts() == {"decode-2", "prefill-0"}
    with pytest.raises(InvalidArgument):
        await registry.request_restart(["decode-3", "decode 1\n"])
    assert await registry.restarts() == {"decode-2", "prefill-0"}


async def test_a_name_is_given_once_whoever_forgot(registry: Registry) -> None:
    assert [await registry.next_name("decode", 0) for _ in range(2)] == ["decode-0", "decode-1"]
    assert await registry.next_name("prefill", 0) == "prefill-0"
    assert await registry.next_name("decode", 7) == "decode-7", "Redis had lost some"
    assert await registry.next_name("decode", 0) == "decode-8", "the caller has lost some"
    await registry._call("HSET", "kvrelay:names", "decode", "junk")
    assert await registry.next_name("decode", 9) == "decode-9"
    await registry._call("SET", "kvrelay:names", "junk")
    assert await registry.next_name("decode", 10) == "decode-10"


_ODD_NUMBERS = ["", "junk", "-1", "1.5", "nan", "inf", "1e18", "1e300", "1e400", str(2**53)]
_ODD_VALUES = [
    *(("SET", number) for number in _ODD_NUMBERS),
    *(("HSET", field, number) for field in ("decode", "term", "beat") for number in _ODD_NUMBERS),
    *(("SET", json.dumps({"schema": 1, "value": {"epoch": odd}})) for odd in (1e300, 2**53, -1)),
    ("LPUSH", "junk"),
]


@pytest.mark.parametrize(
    "key", ["kvrelay:epoch", "kvrelay:term", "kvrelay:names", "kvrelay:leader", "worker"]
)
async def test_an_odd_value_in_any_key_blocks_no_writer(registry: Registry, key: str) -> None:
    key = key.replace("worker", "kvrelay:worker:decode-0")
    epoch = least = 0
    for command, *words in _ODD_VALUES:
        await registry._call("DEL", key)
        await registry._call(command, key, *words)
        await registry.publish_worker(worker("decode-1", epoch=epoch))
        await registry.remove_worker("decode-1", epoch)
        later = await registry.next_epoch(epoch)
        assert epoch < later < 2**53, (command, words)
        epoch = later
        name = await registry.next_name("decode", least)
        number = int(name.removeprefix("decode-"))
        # The worker above has the name decode-1.
        assert least <= number <= max(least, 2), (command, words)
        least = number + 1
        await registry.publish_worker(worker(epoch=epoch, term=3))
        assert [one.epoch for one in await registry.workers()] == [epoch], (command, words)
        lease = await registry.renew_lease("us", 3)
        assert lease.owner == "us", (command, words)
        assert 3 < lease.term < 2**53, (command, words)
        await registry.release_lease("us")


async def test_models_share_a_redis_and_see_nothing_of_each_other() -> None:
    async with (
        EmbeddedRedis() as redis,
        await Registry.connect(redis.url) as alone,
        await Registry.connect(redis.url, namespace="kvrelay@small") as small,
        await Registry.connect(redis.url, namespace="kvrelay@small.2") as other,
    ):
        await small.set_desired({"decode": 3})
        assert await small.next_name("decode", 0) == "small.decode-0"
        await small.publish_worker(worker("small.decode-0"))
        await small.request_drain("small.decode-0")
        await leads(small, "controller-a")
        for one, name in ((alone, "decode-0"), (other, "small.2.decode-0")):
            assert await one.workers() == ()
            assert await one.desired() == {}
            assert await one.drains() == frozenset()
            assert await one.next_name("decode", 0) == name
            assert (await one.renew_lease("controller-b", 0)).owner == "controller-b"
        assert [one.worker_id for one in await small.workers()] == ["small.decode-0"]
