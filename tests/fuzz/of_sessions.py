"""gRPC messages between routers and workers: events and commands."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fuzz.parser import Feed, Parser
from fuzz.proto import spoiled_bytes
from fuzz.rig import Rig, rig
from google.protobuf.message import DecodeError
from support.no_adapters import NoAdapters
from support.no_grammars import NoGrammars
from support.transfer_ends import LAYOUT, MemoryFile

from decode_worker.decode_stage import DecodeStage
from kv_transfer.sender import Sender
from kvrelay.clock import ManualClock
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.errors import Code, InvalidArgument, KvRelayError
from kvrelay.tenants import ANONYMOUS
from kvrelay.types.requests import (
    Handoff,
    PrefillTimings,
    SamplingParams,
    SequenceSpec,
    TokenLogprobs,
)
from kvrelay.wire import inference, worker
from kvrelay.wire.inference import GenerateRequest, SamplingOptions
from kvrelay.worker.context import Identity, WorkerContext
from kvrelay.worker.session import RouterSession
from kvrelay.worker.worker import Worker
from kvrelay.worker_messages import (
    Abort,
    Failed,
    HandedOff,
    HandoffTarget,
    Prefill,
    PrefixSource,
    Refused,
    Renew,
    Reserve,
    Reserved,
    RunLocal,
    SequenceTokens,
    TokenBatch,
)
from router.api.http.account import account
from router.runtime.stream_reader import StreamReader

# A worker's events

_TARGET = HandoffTarget("decode-0", "127.0.0.1:1", 1, 42, 1, 4, 0, "fake", "here")
_TIMINGS = PrefillTimings(0.1, 0.2, 3, 1, 2, 0.05)
_EVENTS = (
    Reserved("long", 1, _TARGET),
    TokenBatch(
        (
            SequenceTokens(
                "long", 1, 0, (20,), (TokenLogprobs(-0.5, ((20, -0.5),)),), None, _TIMINGS
            ),
        )
    ),
    TokenBatch(
        (
            SequenceTokens("short", 2, 0, (20, 21)),
            SequenceTokens("long", 1, 1, (22, 23), finish_reason="length"),
        )
    ),
    HandedOff("long", 1, Handoff("shm", 2, 64, 128, 0, 0.1, 0.05, "same host")),
    Refused("short", 2, "full"),
    Failed("short", 2, Code.DATA_LOSS, "digest"),
)


def _joined(parts: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(one)) + one for one in parts)


def _parted(data: bytes) -> list[bytes]:
    parts = []
    while data:
        (size,) = struct.unpack("<I", data[:4])
        parts.append(data[4 : 4 + size])
        data = data[4 + size :]
    return parts


def events(draw: random.Random) -> bytes:
    """Several, each with the number of the worker that sends it before it."""
    chosen = (
        list(_EVENTS[: draw.randint(1, len(_EVENTS))])
        if draw.random() < 0.7
        else draw.choices(_EVENTS, k=3)
    )
    parts = []
    for event in chosen:
        message = worker.event_to_proto(event)
        data = spoiled_bytes(draw, message) if draw.random() < 0.6 else message.SerializeToString()
        sender = isinstance(event, HandedOff) or (
            isinstance(event, TokenBatch) and len(event.sequences) == 1
        )
        parts.append(bytes([sender if draw.random() < 0.9 else not sender]) + data)
    return _joined(parts)


@contextmanager
def hearing() -> Iterator[Feed]:
    with rig(prefill=True) as made:
        for one in made.workers.values():
            one.answers = False

        def feed(data: bytes) -> str:
            made.forget()
            outcome = made.run(_hear(made, _parted(data)))
            made.check_empty()
            return outcome

        yield feed


async def _hear(made: Rig, messages: Sequence[bytes]) -> str:
    """Two requests are under way when the events come; whatever these say, each ends once and hears
    so.
    """
    sampling = SamplingOptions(max_tokens=8, seed=1, logprobs=1)
    streams = []
    for request_id, prompt in (("long", tuple(range(10, 50))), ("short", (10, 11, 12))):
        request = GenerateRequest(request_id, token_ids=prompt, sampling=sampling)
        streams.append(await made.frontend.open(request, ANONYMOUS, made.clock.now(), None))
    reading = [asyncio.create_task(_read(one)) for one in streams]
    refused = 0
    for message in messages:
        name = ("decode-0", "prefill-0")[message[0]]
        try:
            event = worker.event_from_proto(worker.pb.SessionResponse.FromString(message[1:]))
        except (InvalidArgument, DecodeError):
            refused += 1  # and the session ends
            continue
        if not isinstance(event, worker.Welcome):
            made.driver.worker_said(name, event)
    await asyncio.sleep(0)
    for stream in streams:
        life = stream.life
        if (
            life.assignment is not None and not life.ended and len(messages) % 2
        ):  # the rest of the answer is as it should be
            rest = SequenceTokens(
                stream.request.request_id, life.attempt, len(life.tokens), (20,), (), "length"
            )
            made.driver.worker_said(life.assignment.decode, TokenBatch((rest,)))
        made.driver._carry_out(
            made.driver.dispatcher.tick(made.clock.now() + 1.0), made.clock.now()
        )  # the account is late
        made.frontend.cancel(stream)
    ends = await asyncio.gather(*reading)
    return " ".join(sorted({*ends, *(["refused"] if refused else [])}))


async def _read(stream: Any) -> str:
    """How the stream ended. What came of it can be told to any client."""
    finish = ""
    index = 0
    try:
        async for _, response in StreamReader([stream]).responses():
            inference.response_to_proto(response).SerializeToString()
            assert response.index == index
            index += len(response.token_ids)
            finish = response.finish_reason or ""
            if finish:
                json.dumps(account([response]), allow_nan=False)
    except KvRelayError as error:
        return error.code.name
    assert finish in ("stop", "length"), finish
    return finish


# A router's commands

_SPEC = SequenceSpec("r", 1, (10, 11, 12), 3, SamplingParams(max_tokens=4, seed=1), "salt", 0)
_COMMANDS = (
    Reserve(_SPEC, 5.0, "prefill-0"),
    RunLocal(_SPEC),
    Renew((1, 2), 5.0),
    Abort("r", 1),
    Prefill(_SPEC, _TARGET, PrefixSource("decode-1", "127.0.0.1:1", 16)),
)


def commands(draw: random.Random) -> bytes:
    return _joined(
        [
            spoiled_bytes(draw, worker.command_to_proto(draw.choice(_COMMANDS)))
            for _ in range(draw.randint(1, 5))
        ]
    )


class PlayedRunner:
    """What a worker asks of its model while no step runs."""

    def __init__(self) -> None:
        self.kv = MemoryFile(num_blocks=64)
        self.layout = LAYOUT
        self.layout_hash, self.model_id = LAYOUT.hash("test"), "test"
        self.sampled_model_id = self.tokenizer_id = ""
        self.max_model_len, self.vocab_size, self.eos_token_ids = 200, 100, frozenset({2})
        self.grammars = NoGrammars()
        self.adapters = NoAdapters()


@contextmanager
def commanding() -> Iterator[Feed]:
    """A real decode worker that takes no step."""
    with asyncio.Runner() as runner:
        made = runner.run(_decode_worker())
        made.context.engine.proven = True  # as after its first steps

        def feed(data: bytes) -> str:
            return runner.run(_command(made, _parted(data)))

        yield feed
        runner.run(made.context.sender.close())


async def _decode_worker() -> Worker:
    played: Any = PlayedRunner()
    clock = ManualClock(100.0)
    cache = KvCache(64, LAYOUT.block_size)
    sender = Sender(
        played.kv,
        worker_id="decode-0",
        host_id="here",
        model_id="test",
        layout_hash=played.layout_hash,
        clock=clock,
    )
    identity = Identity("decode-0", "decode", 1, "127.0.0.1:1", "here")
    config = ClusterConfig.model_validate(
        {
            "kv": {"block_size": LAYOUT.block_size},
            "decode": {"max_batch": 4, "chunk_tokens": 16},
        }
    )
    return Worker(WorkerContext(identity, config, played, cache, sender, clock), DecodeStage)


async def _command(made: Worker, messages: Sequence[bytes]) -> str:
    session = RouterSession("router-0")
    outcome = "taken"
    for message in messages:
        try:
            command = worker.command_from_proto(worker.pb.SessionRequest.FromString(message))
            if isinstance(command, worker.Hello):
                continue
            made.handle(command, session)
        except (KvRelayError, DecodeError):
            outcome = "refused"  # and the session ends
            break
    cache, leases = made.context.cache, made.stage.inbound.leases
    cache.check_integrity()
    leases.check_integrity()
    made.session_ended(session)
    assert cache.pool.num_held == 0, "blocks are held for a router that is gone"
    assert not made.context.sessions
    assert not len(leases)
    session.end()
    async for event in session.events():
        worker.event_to_proto(event).SerializeToString()
    return outcome


PARSERS = (
    Parser("events", events, hearing),
    Parser("commands", commands, commanding),
)
