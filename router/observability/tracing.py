"""OpenTelemetry tracing: one trace for each request, with a span for each phase.

The spans are built from the ledger after the request has ended, so tokens have no tracing cost. A
thread of the SDK exports the spans. Attribute names follow
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans; `kvrelay.*` are kvrelay's own.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from kvrelay.clock import Clock
from kvrelay.process.telemetry import get_logger
from router.observability.recent_requests import phases_of
from router.runtime.stream import Stream

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

# Time for the last spans when the router stops.
FLUSH_S = 3.0
_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
_OFF = {("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")}
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

log = get_logger("router.tracing")


class Tracing:
    """Traces of ended requests. Does nothing without a provider."""

    def __init__(self, model: str, clock: Clock, provider: TracerProvider | None) -> None:
        self._model = model
        self._clock = clock
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("kvrelay.router")

    @classmethod
    def from_environment(cls, model: str, clock: Clock) -> Tracing:
        """Returns tracing as configured by OpenTelemetry's OTEL_* variables. Tracing is on if they
        name an endpoint and do not disable it.

        Invalid values are logged and disable tracing.
        """
        given = {(name, os.environ.get(name, "").strip().lower()) for name, _ in _OFF}
        off = not given.isdisjoint(_OFF)
        return cls(
            model, clock, _provider() if any(map(os.environ.get, _ENDPOINTS)) and not off else None
        )

    def ended(self, stream: Stream) -> None:
        """Records the trace of a request that has ended."""
        if self._tracer is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        assert stream.ended is not None
        # Offset from the router's clock to Unix time.
        offset = time.time_ns() - round(self._clock.now() * 1e9)

        def unix_ns(seconds: float) -> int:
            return round(seconds * 1e9) + offset

        request = stream.request
        parent = TraceContextTextMapPropagator().extract({"traceparent": request.traceparent})
        operation = "chat" if request.chat else "text_completion"
        root = self._tracer.start_span(
            f"{operation} {self._model}",
            parent,
            SpanKind.SERVER,
            self._attributes(stream, operation),
            start_time=unix_ns(request.arrival),
        )
        if not root.is_recording():
            return
        within = set_span_in_context(root)
        began = request.arrival
        for name, seconds in phases_of(stream.life, stream.ended_at):
            span = self._tracer.start_span(name, within, start_time=unix_ns(began))
            began += seconds
            span.end(unix_ns(began))
        if stream.ended.error is not None and stream.ended.finish_reason == "error":
            root.set_status(Status(StatusCode.ERROR, stream.ended.error.message))
        root.end(unix_ns(stream.ended_at))

    async def close(self) -> None:
        """Exports the remaining spans, within FLUSH_S seconds."""
        if self._provider is not None:
            # An unavailable collector blocks the shutdown.
            last = threading.Thread(target=self._provider.shutdown, daemon=True)
            last.start()
            await asyncio.to_thread(last.join, FLUSH_S)

    def _attributes(self, stream: Stream, operation: str) -> dict[str, Any]:
        assert stream.ended is not None
        request, life, placed, usage = (
            stream.request,
            stream.life,
            stream.assignment,
            stream.usage(),
        )
        first, handoff, error = life.timeline.first_token_at, life.handoff, stream.ended.error
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "kvrelay",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": request.client_id,
            "gen_ai.response.finish_reasons": (stream.ended.finish_reason,),
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            **{f"gen_ai.request.{name}": getattr(request.sampling, name) for name in _SAMPLING},
            "error.type": error and error.code.name,
            "kvrelay.path": life.path,
            "kvrelay.why": placed and placed.own_why,
            "kvrelay.load": placed and (placed.load or None),
            "kvrelay.prefill_worker": placed and (placed.prefill or None),
            "kvrelay.decode_worker": placed and placed.decode,
            "kvrelay.attempts": len(life.attempts),
            "kvrelay.time_to_first_token": None if first is None else first - request.arrival,
            "kvrelay.handoff.bytes": handoff and handoff.bytes,
            "kvrelay.handoff.seconds": handoff and handoff.seconds,
            "kvrelay.handoff.transport": handoff and handoff.transport,
        }
        return {name: value for name, value in attributes.items() if value is not None}


def _provider() -> TracerProvider | None:
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # Reads OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.
        given = OTELResourceDetector().detect().attributes
        named = Resource.create({} if given.get(SERVICE_NAME) else {SERVICE_NAME: "kvrelay"})
        provider = TracerProvider(resource=named, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(_exporter()))
    except ImportError:
        log.warning("tracing_extra_missing")
        return None
    except Exception as error:  # noqa: BLE001 - the SDK does not document its errors
        log.warning(
            "tracing_misconfigured",
            reason=f"{type(error).__name__}: {error}",
        )
        return None
    return provider


def _exporter() -> SpanExporter:
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL"
    )
    if protocol not in (None, "", "grpc", "http/protobuf"):
        raise ValueError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; allowed are grpc and http/protobuf"
        )
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter as HttpExporter,
        )

        return HttpExporter()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
        OTLPSpanExporter as GrpcExporter,
    )

    return GrpcExporter()
