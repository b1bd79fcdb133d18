"""A real gRPC server whose answers a test writes down beforehand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import grpc

from kvrelay.errors import KvRelayError
from kvrelay.types.requests import Attempt, Handoff, Ledger, Path, Usage
from kvrelay.wire import cluster
from kvrelay.wire import inference as wire
from kvrelay.wire.status import abort

WHY: dict[Path, str] = {
    "disaggregated": "policy",
    "local": "5 uncached prompt tokens are below local_below_tokens=64",
}
# Send, fail, stay for some seconds, or "hang"
Step = wire.GenerateResponse | KvRelayError | float | str
LEDGER = Ledger(
    phases=(("queue", 0.002), ("prefill", 0.008)),
    ttft_seconds=0.01,
    second_token_gap_seconds=0.004,
    decode_seconds=0.02,
    e2e_seconds=0.03,
    handoff=Handoff(
        "shm",
        blocks=3,
        block_bytes=1024,
        bytes=3072,
        cached_blocks=1,
        seconds=0.002,
        exposed_seconds=0.001,
    ),
    attempts=(Attempt("disaggregated", "kv_aware", "prefill-0", "decode-0", "finished"),),
)


def tokens(index: int, *token_ids: int, request_id: str = "r") -> wire.GenerateResponse:
    return wire.GenerateResponse(
        request_id, index, token_ids, "".join(f" t{one}" for one in token_ids)
    )


def last(response: wire.GenerateResponse, path: Path = "disaggregated") -> wire.GenerateResponse:
    """The response, as an answer's last one."""
    return replace(
        response,
        finish_reason="length",
        usage=Usage(
            prompt_tokens=7,
            cached_tokens=2,
            completion_tokens=response.index + len(response.token_ids),
        ),
        path=path,
        why=WHY[path],
        ledger=LEDGER,
    )


class ScriptedRouter(wire.InferenceServiceServicer):
    """Plays one script per call; when they are used up, answers as asked: tokens 100, 101, ... up
    to max_tokens.
    """

    def __init__(self, *scripts: Sequence[Step], path: Path = "disaggregated") -> None:
        self.scripts = list(scripts)
        self.path: Path = path
        self.requests: list[wire.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.time_remaining: list[float | None] = []
        self.cancelled = threading.Event()
        self.hanging = threading.Event()
        self.list_errors: list[KvRelayError] = []
        self.models = ["demo"]

    async def Generate(
        self, request: wire.pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        self.requests.append(wire.request_from_proto(request))
        self.metadata.append(dict(context.invocation_metadata()))
        self.time_remaining.append(context.time_remaining())
        steps = self.scripts.pop(0) if self.scripts else self._obedient(self.requests[-1])
        try:
            for step in steps:
                if isinstance(step, KvRelayError):
                    await abort(context, step)
                elif isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, str):
                    self.hanging.set()
                    await asyncio.Event().wait()
                else:
                    await context.write(wire.response_to_proto(step))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def ListModels(
        self, request: wire.pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> wire.pb.ListModelsResponse:
        if self.list_errors:
            await abort(context, self.list_errors.pop(0))
        return wire.models_to_proto(
            [
                wire.ModelInfo(name, 4096, "float32", "LlamaForCausalLM", vocab_size=337)
                for name in self.models
            ]
        )

    def _obedient(self, request: wire.GenerateRequest) -> list[wire.GenerateResponse]:
        have, want = len(request.resume), request.sampling.max_tokens or 4
        answer = [tokens(index, 100 + index) for index in range(have, want)] or [tokens(have)]
        return [*answer[:-1], last(answer[-1], self.path)]


@contextmanager
def serving(
    servicer: wire.InferenceServiceServicer | cluster.ClusterServiceServicer,
    credentials: grpc.ServerCredentials | None = None,
) -> Iterator[str]:
    """Serves from a thread of its own, so that blocking clients can be tested too; yields
    HOST:PORT.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, int]:
        # As a router's: gRPC's own server ends a connection that sends pings for half a minute.
        server = grpc.aio.server(options=[("grpc.http2.max_ping_strikes", 0)])
        if isinstance(servicer, cluster.ClusterServiceServicer):
            cluster.add_ClusterServiceServicer_to_server(servicer, server)
        else:
            wire.add_InferenceServiceServicer_to_server(servicer, server)
        if credentials is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        return server, port

    try:
        server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
