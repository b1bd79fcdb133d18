"""The request log: one event for each ended request."""

from __future__ import annotations

import logging

from kvrelay.process.telemetry import get_logger, trace_id
from router.runtime.stream import Stream

MAX_WHY = 200  # characters of a reason

log = get_logger("router.request")


class RequestLog:
    """Logs sizes, names and times in milliseconds, but never text or tokens."""

    def ended(self, stream: Stream) -> None:
        """Logs the end of a request as `request_ended`."""
        if not log.is_enabled_for(logging.INFO):
            return
        assert stream.ended is not None
        request, life, placed = stream.request, stream.life, stream.assignment
        first = life.timeline.first_token_at
        error = stream.ended.error
        line: dict[str, object] = {
            "request": request.client_id,
            "tenant": request.tenant.name or None,
            "finish_reason": stream.ended.finish_reason,
            "path": life.path,
            "why": placed.own_why[:MAX_WHY] if placed else None,
            "load": placed.load or None if placed else None,
            "prompt_tokens": len(request.token_ids),
            "cached_tokens": life.cached_tokens,
            "output_tokens": stream.num_tokens - len(request.resume),
            "ttft_ms": None if first is None else round((first - request.arrival) * 1000, 2),
            "e2e_ms": round((stream.ended_at - request.arrival) * 1000, 2),
            "prefill_worker": placed.prefill or None if placed else None,
            "decode_worker": placed.decode if placed else None,
            "attempts": len(life.attempts),
            "trace_id": trace_id(request.traceparent),
            "error": error and error.code.name,
            "error_message": error and error.message[:MAX_WHY],
        }
        log.info(
            "request_ended", **{name: value for name, value in line.items() if value is not None}
        )
