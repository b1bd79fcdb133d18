"""Traces as a collector gets them, over both of OTLP's transports."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from support.router_harness import running_router

from kvrelay.clock import MonotonicClock
from kvrelay.wire.inference import (
    GenerateRequest,
    InferenceServiceStub,
    SamplingOptions,
    request_to_proto,
)
from router.observability import tracing
from router.observability.tracing import Tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
PROMPT = tuple(range(20, 60))


class Collector(TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []

    def Export(
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self.requests.append(request)
        return ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Span]:
        """Each span once: an exporter that got no answer in time sends its batch again."""
        by_id = {
            span.span_id: span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }
        return list(by_id.values())

    @contextmanager
    def over_grpc(self) -> Iterator[str]:
        server = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.stop(None).wait(10)

    @contextmanager
    def over_http(self) -> Iterator[str]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                return

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
            thread.join(10)


def attributes(span: Span) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return (
            [plain(one) for one in value.array_value.values]
            if kind == "array_value"
            else getattr(value, kind)
        )

    return {one.key: plain(one.value) for one in span.attributes}


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_a_request_is_a_trace_whose_phases_follow_each_other(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine needs longer than a router's shutdown allows for.
    monkeypatch.setattr(tracing, "FLUSH_S", 60.0)
    collector = Collector()
    with collector.over_grpc() if protocol == "grpc" else collector.over_http() as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        request = GenerateRequest(
            "mine", token_ids=PROMPT, sampling=SamplingOptions(max_tokens=4, seed=7)
        )
        body = {"model": "demo", "prompt": list(PROMPT), "max_tokens": 4}
        async with running_router() as router:
            async with grpc.aio.insecure_channel(router.grpc) as channel:
                call = InferenceServiceStub(channel).Generate(
                    request_to_proto(request), metadata=(("traceparent", TRACEPARENT),)
                )
                async for _ in call:
                    pass
            async with httpx.AsyncClient(base_url=router.http) as http:
                headers = {"traceparent": TRACEPARENT}
                assert (
                    await http.post("/v1/completions", json=body, headers=headers)
                ).status_code == 200
                assert (await http.post("/v1/completions", json=body)).status_code == 200
    resources = {
        one.key: one.value.string_value
        for one in collector.requests[0].resource_spans[0].resource.attributes
    }
    assert resources["service.name"] == "kvrelay"
    roots = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert [(root.trace_id.hex() == TRACE, root.parent_span_id.hex()) for root in roots] == [
        (True, PARENT),
        (True, PARENT),
        (False, ""),
    ]
    for root in roots:
        phases = [span for span in collector.spans if span.parent_span_id == root.span_id]
        assert {span.trace_id for span in phases} == {root.trace_id}
        names = [span.name for span in phases]
        assert names[:3] == ["tokenize", "queue", "reserve"]
        assert {"prefill", "decode"} <= set(names)
        assert phases[0].start_time_unix_nano == root.start_time_unix_nano
        for before, after in itertools.pairwise(phases):
            assert abs(before.end_time_unix_nano - after.start_time_unix_nano) < 1000, (
                "no gap but by rounding"
            )
        assert phases[-1].end_time_unix_nano <= root.end_time_unix_nano + 1000
    said = attributes(roots[0])
    assert roots[0].name == f"text_completion {said['gen_ai.request.model']}"
    assert said["gen_ai.response.id"] == "mine"
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (40, 4)
    assert (said["gen_ai.request.max_tokens"], said["gen_ai.request.seed"]) == (4, 7)
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert (said["kvrelay.prefill_worker"], said["kvrelay.decode_worker"]) == (
        "prefill-0",
        "decode-0",
    )
    assert said["kvrelay.path"] == "disaggregated"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
    ],
    ids=["no endpoint", "disabled", "no exporter"],
)
async def test_it_is_off_unless_an_endpoint_is_named(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tracing = Tracing.from_environment("demo", MonotonicClock())
    assert tracing._tracer is None
    await tracing.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke"),
        ("OTEL_TRACES_SAMPLER_ARG", "often"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-1"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "few"),
    ],
)
async def test_a_wrong_variable_costs_the_traces_only(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv(name, value)
    tracing = Tracing.from_environment("demo", MonotonicClock())
    if name != "OTEL_TRACES_SAMPLER_ARG":  # the SDK warns by itself, and takes them all
        assert tracing._tracer is None
    await tracing.close()


@pytest.mark.parametrize(
    ("environment", "service"),
    [
        ({}, "kvrelay"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine,zone=a"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine", "OTEL_SERVICE_NAME": "ours"}, "ours"),
    ],
)
async def test_the_service_is_called_as_the_operator_says(
    environment: dict[str, str], service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    tracing = Tracing.from_environment("demo", MonotonicClock())
    assert tracing._provider is not None
    assert tracing._provider.resource.attributes["service.name"] == service
    await tracing.close()
