"""KV is pushed and lent to those alone whom the router has chosen, and others are refused before
anything is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from support.few_hashes import Cut, one_for_each_place
from support.transfer_ends import (
    HASH,
    KEY,
    LAYOUT,
    SENDER,
    DecodeEnd,
    MemoryFile,
    decode_end,
    sender_of,
)
from support.transfer_lender import BLOCKS, SALT, TOKENS, lender

from kv_transfer.receiver_transports import ReceiverTransports
from kv_transfer.transports.named import NamedOutbound
from kvrelay.errors import FailedPrecondition, NotFound, PermissionDenied
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.types.workers import WorkerInfo
from kvrelay.wire.transfer import SERVICE_NAME, FetchRequest, KvOpen, frame_to_bytes, kv_push, pb
from kvrelay.wire.worker import target_to_proto
from kvrelay.worker_messages import HandoffTarget, PrefixSource
from router.runtime.sessions import WorkerSession


def opening(target: HandoffTarget, transport: str, **changes: Any) -> KvOpen:
    right = KvOpen(*KEY, target.lease_id, target.epoch, target.generation, HASH, transport)
    return replace(right, **{"sender": SENDER, "capability": target.capability, **changes})


async def refused(address: str, frame: KvOpen) -> str:
    """What the peer says to a push that begins so."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = kv_push(channel)()
        await call.write(frame_to_bytes(frame))
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
        return await call.details()


WRONG: dict[str, Callable[[DecodeEnd, HandoffTarget], dict[str, str]]] = {
    "none": lambda decode, target: {"capability": ""},
    "a guess": lambda decode, target: {"capability": "0" * len(target.capability)},
    "no ASCII": lambda decode, target: {"capability": "ж"},
    "another worker's name": lambda decode, target: {"sender": "prefill-1"},
    "that of another lease": lambda decode, target: {
        "capability": decode.grant([1, 2, 5, 6]).capability
    },
    "that of the same request's last attempt": lambda decode, target: {
        "capability": decode.grant([1, 2, 5, 6], key=(KEY[0], KEY[1] - 1)).capability
    },
    "one for another worker": lambda decode, target: {
        "capability": decode.grant([1, 2, 5, 6], sender="prefill-1").capability
    },
}


@pytest.mark.parametrize("transport", ["grpc", "shm", "memory", "gloo"])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
async def test_a_push_without_the_leases_capability_is_refused_before_anything_is_done(
    wrong: Callable[[DecodeEnd, HandoffTarget], dict[str, str]],
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected: list[KvOpen] = []

    def record(_: ReceiverTransports, frame: KvOpen, __: object) -> None:
        connected.append(frame)
        raise AssertionError("nothing is mapped, joined or read")

    monkeypatch.setattr(ReceiverTransports, "accept", record)
    source = MemoryFile()
    async with decode_end() as decode:
        before = decode.arena.buffer.clone()
        target = decode.grant(BLOCKS)
        frame = opening(target, transport, **wrong(decode, target))
        if transport in ("shm", "memory"):
            frame = NamedOutbound(source, digests=True).announce(frame)
        assert "capability does not match this PushGrant" in await refused(decode.address, frame)
        assert (connected, decode.committed, decode.receiver.under_way) == ([], [], 0)
        assert decode.arena.buffer.equal(before)


async def test_a_capability_of_an_earlier_incarnation_is_worth_nothing() -> None:
    async with decode_end() as earlier:
        old = earlier.grant(BLOCKS)
    async with decode_end() as decode:
        new = decode.grant(BLOCKS)
        assert (old.lease_id, old.generation, old.epoch) == (
            new.lease_id,
            new.generation,
            new.epoch,
        )
        await refused(decode.address, opening(new, "grpc", capability=old.capability))


async def test_a_renewed_lease_keeps_its_capability() -> None:
    source = MemoryFile()
    async with decode_end() as decode, sender_of(source) as sender:
        target = decode.grant(BLOCKS)
        decode.leases.renew([target.lease_id], 60.0, decode.clock.now())
        push = sender.open(KEY, target)
        push.send(0, [1, 2, 5, 4])
        await push.commit(42, 16, sender.clock.now())
        assert len(decode.committed) == 1


async def test_who_was_granted_a_prefix_gets_it() -> None:
    async with lender() as lent:
        assert await lent.ask(lent.right) == len(BLOCKS)
        assert len(lent.asking.committed) == 1


@pytest.mark.parametrize(
    "steal",
    [
        lambda request: replace(request, capability=""),
        lambda request: replace(request, request_id="another"),
        lambda request: replace(request, attempt=request.attempt + 1),
        lambda request: replace(request, granted_tokens=request.granted_tokens + LAYOUT.block_size),
        lambda request: replace(request, target=replace(request.target, worker_id="prefill-9")),
        lambda request: replace(request, target=replace(request.target, address="127.0.0.1:9")),
        lambda request: replace(request, token_ids=(*request.token_ids, 15)),
    ],
    ids=["none", "request", "attempt", "more granted", "worker", "address", "more tokens"],
)
async def test_nobody_else_gets_it_nor_more_of_it(
    steal: Callable[[FetchRequest], FetchRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lender() as lent:

        def looked_up(*_: object) -> list[int]:
            raise AssertionError("the cache is not even looked into")

        monkeypatch.setattr(lent.cache, "find", looked_up)
        with pytest.raises(PermissionDenied):
            await lent.ask(steal(lent.right))
        assert lent.asking.committed == []
        assert lent.prefix_export.exported == 0


def changed(position: int) -> Callable[[FetchRequest], FetchRequest]:
    tokens = [*TOKENS]
    tokens[position] += 1
    return lambda request: replace(request, token_ids=tuple(tokens))


@pytest.mark.parametrize(
    ("ask", "blocks"),
    [
        (lambda request: replace(request, salt=""), 0),
        (lambda request: replace(request, salt=SALT + "x"), 0),
        (changed(0), 0),
        (changed(LAYOUT.block_size - 1), 0),
        (changed(LAYOUT.block_size), 1),
        (changed(len(TOKENS) - 1), len(BLOCKS) - 1),
    ],
    ids=["no salt", "another salt", "first token", "end of a block", "second block", "last token"],
)
@pytest.mark.parametrize(
    "cut", [None, one_for_each_place], ids=["distinct hashes", "colliding hashes"]
)
async def test_kv_is_lent_of_the_tokens_and_the_salt_that_are_shown(
    ask: Callable[[FetchRequest], FetchRequest], blocks: int, cut: Cut | None
) -> None:
    async with lender(cut) as lent:
        if blocks:
            assert await lent.ask(ask(lent.right)) == blocks
        else:
            with pytest.raises(NotFound, match=f"contains only 0 of the {len(TOKENS)} tokens"):
                await lent.ask(ask(lent.right))
        assert [num_tokens for _, _, num_tokens in lent.asking.committed] == [
            blocks * LAYOUT.block_size
        ] * bool(blocks)


async def test_a_worker_that_knows_blocks_by_64_bits_is_lent_nothing() -> None:
    """It sends such hashes in field 3, and no tokens."""
    async with lender() as lent:
        right = lent.right
        message = pb.FetchRequest(
            request_id=right.request_id,
            attempt=right.attempt,
            target=target_to_proto(right.target),
            granted_tokens=right.granted_tokens,
            capability=right.capability,
        )
        hashes = bytes([3 << 3 | 2, 16]) + bytes(range(16))
        async with grpc.aio.insecure_channel(lent.address) as channel:
            ask = channel.unary_unary(f"/{SERVICE_NAME}/Fetch")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(message.SerializeToString() + hashes, timeout=20.0)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert (lent.prefix_export.exported, lent.asking.committed) == (0, [])


async def test_kv_of_another_model_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix cache is of the one model that its worker has loaded; whose that is the borrower
    asks before any KV.
    """
    async with lender() as lent:
        monkeypatch.setattr(lent.prefix_export._sender, "model_id", "another")
        monkeypatch.setattr(lent.prefix_export._sender, "layout_hash", "another's")
        with pytest.raises(
            FailedPrecondition, match="the KV is of model another, and this worker has test"
        ):
            await lent.ask(lent.right)
        assert lent.asking.committed == []


async def test_a_key_of_an_earlier_incarnation_lends_nothing() -> None:
    async with lender() as earlier, lender() as lent:
        capability = replace(earlier.right, target=lent.asking.grant(BLOCKS)).capability
        with pytest.raises(PermissionDenied):
            await lent.ask(replace(lent.right, capability=capability))


def test_a_router_grants_no_fetch_from_a_worker_that_it_has_no_session_with() -> None:
    def info(name: str) -> WorkerInfo:
        return WorkerInfo(name, "decode", 1, "ready", "127.0.0.1:1", "m", "l", 16, 64, "here", 4096)

    class Nobody:
        def worker_found(self, info: WorkerInfo) -> None: ...
        def worker_lost(self, worker_id: str, expected: bool) -> None: ...
        def worker_said(self, worker_id: str, event: object) -> None: ...

    session = WorkerSession(info("decode-0"), "router", Nobody())
    spec = SequenceSpec("r", 0, (1, 2), 2, SamplingParams(seed=0))
    assert (
        session.grant_fetch(PrefixSource("decode-0", "127.0.0.1:1", 16), spec, info("prefill-0"))
        is None
    )
