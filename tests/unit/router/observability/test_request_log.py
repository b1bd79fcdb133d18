"""The line that a request leaves in the log."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs
from support.router_harness import running_router

import kvrelay

TRACE = "0af7651916cd43dd8448eb211c80319c"


async def test_one_line_for_each_request_without_its_text() -> None:
    with capture_logs() as logs:
        async with running_router() as router, kvrelay.AsyncClient(router.grpc) as client:
            answer = await client.generate(
                token_ids=range(20, 60), max_tokens=4, request_id="mine", seed=1
            )
            stream = client.generate(
                "a secret prompt", max_tokens=4000, request_id="left", ignore_eos=True
            )
            await anext(stream)
            stream.cancel()
            async with asyncio.timeout(60):
                while sum(line["event"] == "request_ended" for line in logs) < 2:
                    await asyncio.sleep(0.01)
    mine, left = (line for line in logs if line["event"] == "request_ended")
    assert {name: mine[name] for name in mine if not name.endswith("_ms")} == {
        "component": "router.request",
        "log_level": "info",
        "event": "request_ended",
        "request": "mine",
        "finish_reason": "length",
        "path": answer.path,
        "why": "40 uncached prompt tokens are at least local_below_tokens=8; "
        "prefill-0 is free first",
        "load": "0 tokens queued",
        "prompt_tokens": 40,
        "cached_tokens": 0,
        "output_tokens": 4,
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
        "attempts": 1,
    }
    assert 0 < mine["ttft_ms"] <= mine["e2e_ms"]
    assert (left["request"], left["finish_reason"], left["error"]) == (
        "left",
        "cancelled",
        "CANCELLED",
    )
    assert "secret" not in str(logs)


@pytest.mark.parametrize(
    ("traceparent", "trace"),
    [
        (f"00-{TRACE}-b7ad6b7169203331-01", TRACE),
        ("", None),
        ("no trace", None),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", None),
        (f"00-{TRACE}-b7ad6b7169203331-01\nforged=1", None),
    ],
)
def test_a_trace_id_is_taken_from_a_valid_parent_only(traceparent: str, trace: str | None) -> None:
    from kvrelay.process.telemetry import trace_id

    assert trace_id(traceparent) == trace
