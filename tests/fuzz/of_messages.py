"""gRPC messages at the endpoints: a client's requests, an operator's, and what a client is told."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fuzz.parser import Feed, Parser
from fuzz.proto import spoiled_bytes
from fuzz.rig import Aborted, Context, rig
from google.protobuf.message import DecodeError, Message

from kvrelay.client.answer import Answer
from kvrelay.errors import KvRelayError
from kvrelay.tenants import ANONYMOUS
from kvrelay.types.chat import ChatMessage
from kvrelay.types.requests import Slo, TokenLogprobs, Usage
from kvrelay.wire import cluster, inference, status
from kvrelay.wire.inference import GenerateRequest, GenerateResponse, SamplingOptions
from router.api.grpc.admin import ClusterService
from router.api.grpc.auth import caller
from router.api.grpc.service import InferenceService
from router.frontend.waiting_room import WaitingRoom

_SAMPLING = SamplingOptions(
    max_tokens=4,
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    seed=3,
    stop=("x",),
    logprobs=2,
    stop_token_ids=(7,),
    repetition_penalty=1.1,
    logit_bias=((5, 1.0),),
    min_tokens=1,
    presence_penalty=0.1,
)
_REQUESTS = [
    inference.request_to_proto(one)
    for one in (
        GenerateRequest("r", "demo", "Once upon a time", sampling=_SAMPLING),
        GenerateRequest(messages=(ChatMessage("user", "hello"),), sampling=_SAMPLING),
        GenerateRequest(
            token_ids=(10, 11, 12),
            sampling=_SAMPLING,
            priority=1,
            resume=(20,),
            cache_salt="s",
            slo=Slo(500, 50.5),
        ),
    )
]


# A client's requests

REFUSALS = {
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "PERMISSION_DENIED",
    "FAILED_PRECONDITION",
    "UNIMPLEMENTED",
    "DEADLINE_EXCEEDED",
}


def generate(draw: random.Random) -> bytes:
    return spoiled_bytes(draw, draw.choice(_REQUESTS))


def refused(end: Aborted) -> str:
    assert end.status.name in REFUSALS, end
    return end.status.name


@contextmanager
def generating() -> Iterator[Feed]:
    with rig() as made:
        service = InferenceService(made.catalogue, made.clock, WaitingRoom(made.clock))

        def feed(data: bytes) -> str:
            try:
                message = inference.pb.GenerateRequest.FromString(data)
            except DecodeError:
                return "no message"  # gRPC refuses it by itself
            context = Context()
            try:
                made.run(_generate(service, message, context))
            except Aborted as end:
                return refused(end)
            finally:
                made.check_empty()
            assert context.written[-1].finish_reason in ("length", "stop"), context.written
            for one in context.written:
                one.SerializeToString()
            return "answered"

        yield feed


async def _generate(
    service: InferenceService, message: inference.pb.GenerateRequest, context: Context
) -> None:
    caller.set(ANONYMOUS)
    try:
        await service.Generate(message, context)
    except KvRelayError as error:  # as GrpcMessages does
        await status.abort(context, error)


# An operator's requests

_ADMIN: list[tuple[type[Message], Message, str]] = [
    (type(one), one, method)
    for one, method in (
        (cluster.pb.SetPoolSizeRequest(prefill=2, decode=3), "SetPoolSize"),
        (cluster.pb.DrainWorkerRequest(worker_id="decode-0"), "DrainWorker"),
        (cluster.pb.WatchStatusRequest(interval_seconds=0.5), "WatchStatus"),
        (cluster.pb.GetStatusRequest(), "GetStatus"),
        (cluster.pb.LoadAdapterRequest(name="sql", path="/nowhere"), "LoadAdapter"),
        (cluster.pb.UnloadAdapterRequest(name="sql"), "UnloadAdapter"),
        (cluster.pb.ListAdaptersRequest(), "ListAdapters"),
    )
]


def admin(draw: random.Random) -> bytes:
    kind = draw.randrange(len(_ADMIN))
    return bytes([kind]) + spoiled_bytes(draw, _ADMIN[kind][1])


@contextmanager
def administering() -> Iterator[Feed]:
    with rig() as made:
        service = ClusterService(made.catalogue)
        made.driver.known = tuple(one.info for one in made.workers.values())

        def feed(data: bytes) -> str:
            kind, _, method = _ADMIN[data[0]]
            try:
                message = kind.FromString(data[1:])
            except DecodeError:
                return "no message"
            try:
                made.run(_call(getattr(service, method), message))
            except Aborted as end:
                return refused(end)
            finally:
                sizes = [*made.registry.sizes.values()]
                assert all(0 <= size <= 1024 for size in sizes), sizes
                assert set(made.registry.drains) <= {"decode-0"}, made.registry.drains
                assert not made.registry.listed, "no folder has an adapter"
            return "done"

        yield feed


async def _call(method: Callable[..., Any], message: Message) -> None:
    """To its end, or to the first thing that it writes."""

    class Enough(Exception):
        pass

    class First(Context):
        async def write(self, message: Any) -> None:
            raise Enough

    caller.set(ANONYMOUS)
    context = First()
    try:
        with contextlib.suppress(Enough):
            await method(message, context)
    except KvRelayError as error:  # as GrpcMessages does
        await status.abort(context, error)


# What a client is told

_ANSWER = inference.response_to_proto(
    GenerateResponse(
        "r",
        0,
        (20, 21),
        "ab",
        (TokenLogprobs(-0.5),) * 2,
        "length",
        Usage(3, 0, 2),
        "local",
        "short",
    )
)
_STATUS = cluster.pb.ClusterStatus(
    model="demo",
    state="ready",
    pools=[
        cluster.pb.PoolStatus(
            name="decode",
            workers=[cluster.pb.WorkerStatus(worker_id="decode-0", pool="decode", state="ready")],
        )
    ],
    decisions=[cluster.pb.ScalingDecision(pool="decode", before=1, after=2, reason="x")],
    router=cluster.pb.RouterStatus(router_id="r"),
)


def answers(draw: random.Random) -> bytes:
    kind = draw.randrange(2)
    return bytes([kind]) + spoiled_bytes(draw, _STATUS if kind else _ANSWER)


@contextmanager
def being_told() -> Iterator[Feed]:
    def feed(data: bytes) -> str:
        try:
            if data[0]:
                cluster.cluster_status_from_proto(cluster.pb.ClusterStatus.FromString(data[1:]))
                return "status"
            answer = Answer(GenerateRequest(prompt="x"))
            answer.begin(0.0)
            answer.receive(
                inference.response_from_proto(inference.pb.GenerateResponse.FromString(data[1:])),
                1.0,
            )
        except (KvRelayError, DecodeError):
            return "refused"
        return "taken"

    yield feed


PARSERS = (
    Parser("generate", generate, generating),
    Parser("admin", admin, administering),
    Parser("answers", answers, being_told),
)
