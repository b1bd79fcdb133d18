"""Every bad request gets its status, at both endpoints, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from bad_input.requests import GOOD, GOOD_BODY, PROMPT, ROWS, Row
from support.fake_worker import answer
from support.router_harness import RouterHarness, running_router

import router.served_model
from kvrelay.errors import Code
from kvrelay.wire.inference import pb, request_to_proto
from kvrelay.wire.status import error_from_rpc
from router.runtime.driver import Driver

METHOD = "/kvrelay.v1.InferenceService/Generate"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Endpoints:
    """Both endpoints of one router, and a look behind them."""

    router: RouterHarness
    driver: Driver
    http: httpx.AsyncClient
    channel: grpc.aio.Channel

    async def generate(self, message: bytes, **options: Any) -> list[pb.GenerateResponse]:
        """What the gRPC endpoint answers to these bytes."""
        call = self.channel.unary_stream(METHOD, None, pb.GenerateResponse.FromString)(
            message, **options
        )
        return [one async for one in call]

    async def refusal(self, message: bytes, **options: Any) -> tuple[Code, str | None, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.generate(message, **options)
        error = error_from_rpc(caught.value)
        return error.code, error.field, error.message

    async def check_nothing_is_left(self) -> None:
        """No request, no block, and the next good requests are served."""
        async with asyncio.timeout(60):
            while self.driver.dispatcher.unfinished or any(
                one.worker.sequences or one.worker.prompts for one in self.router.workers.values()
            ):
                await asyncio.sleep(0.002)
        assert not self.driver._streams
        expected = answer(PROMPT, 7, 3)
        (choice,) = (await self.http.post("/v1/completions", json=GOOD_BODY)).json()["choices"]
        assert choice["token_ids"] == expected
        parts = await self.generate(request_to_proto(GOOD).SerializeToString())
        assert [one for part in parts for one in part.token_ids] == expected


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def endpoints() -> AsyncIterator[Endpoints]:
    made: list[Driver] = []

    class Seen(Driver):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router.served_model, "Driver", Seen)
        async with (
            running_router() as running,
            httpx.AsyncClient(base_url=running.http, timeout=60) as http,
            grpc.aio.insecure_channel(
                running.grpc, options=[("grpc.max_send_message_length", -1)]
            ) as channel,
        ):
            yield Endpoints(running, made[0], http, channel)


def named(row: Row) -> str:
    return row.name.replace(" ", "_")


@pytest.mark.parametrize("row", [row for row in ROWS if row.body is not None], ids=named)
async def test_over_http(endpoints: Endpoints, row: Row) -> None:
    response = await endpoints.http.post(row.path, content=row.body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (
        row.code.http_status,
        row.code.http_status,
        row.code.openai_type,
    ), error
    if row.field and b"NaN" not in row.body and b"Infinity" not in row.body:
        assert error["param"] == row.field, error
    assert len(error["message"]) < 1000
    assert response.headers["x-request-id"].isprintable()
    await endpoints.check_nothing_is_left()


@pytest.mark.parametrize("row", [row for row in ROWS if row.message is not None], ids=named)
async def test_over_grpc(endpoints: Endpoints, row: Row) -> None:
    assert row.message is not None
    code, field, message = await endpoints.refusal(row.message)
    assert code is row.code, message
    if row.field:
        assert field == row.field, message
    assert len(message) < 1000
    await endpoints.check_nothing_is_left()


async def test_a_live_request_id_twice(endpoints: Endpoints) -> None:
    decode = endpoints.router.workers["decode-0"]
    decode.may_step.clear()
    mine = request_to_proto(replace(GOOD, request_id="mine")).SerializeToString()
    first = asyncio.create_task(endpoints.generate(mine))
    async with asyncio.timeout(60):
        while not decode.worker.sequences:
            await asyncio.sleep(0.002)
    code, field, _ = await endpoints.refusal(mine)
    assert (code, field) == (Code.FAILED_PRECONDITION, "request_id")
    again = await endpoints.http.post("/v1/completions", json=GOOD_BODY | {"request_id": "mine"})
    assert (again.status_code, again.json()["error"]["param"]) == (409, "request_id")
    decode.may_step.set()
    assert [one for part in await first for one in part.token_ids] == answer(PROMPT, 7, 3)
    await endpoints.check_nothing_is_left()


@pytest.mark.parametrize(
    # HTTP allows no control character in a header.
    ("header", "param"),
    [("x" * 10_240, "request_id"), ("a\x7f", None), ("ä", "request_id")],
)
async def test_a_request_id_in_a_header(
    endpoints: Endpoints, header: str, param: str | None
) -> None:
    response = await endpoints.http.post(
        "/v1/completions", json=GOOD_BODY, headers={"x-request-id": header.encode("latin-1")}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    await endpoints.check_nothing_is_left()


async def test_a_message_over_the_cap(endpoints: Endpoints) -> None:
    code, _, message = await endpoints.refusal(
        b"\x1a\x80\x80\x80\x02" + b"x" * 4 * 2**20 + b"x" * 2**10
    )
    assert (code, "larger than max" in message) == (Code.RESOURCE_EXHAUSTED, True)
    response = await endpoints.http.post("/v1/completions", content=b" " * (4 * 2**20 + 1))
    assert (response.status_code, response.json()["error"]["code"]) == (413, 413)
    await endpoints.check_nothing_is_left()


async def test_a_compressed_bomb(endpoints: Endpoints) -> None:
    """64 MiB that are 64 KiB on the wire."""
    bomb = b"\x1a\x80\x80\x80\x20" + b"x" * 64 * 2**20
    code, _, _ = await endpoints.refusal(bomb, compression=grpc.Compression.Gzip)
    assert code is Code.RESOURCE_EXHAUSTED
    headers = {"content-encoding": "gzip"}
    response = await endpoints.http.post(
        "/v1/completions", content=gzip.compress(b" " * 64 * 2**20), headers=headers
    )
    assert (response.status_code, response.headers["accept-encoding"]) == (415, "identity")
    await endpoints.check_nothing_is_left()


async def test_headers_over_the_cap(endpoints: Endpoints) -> None:
    response = await endpoints.http.post(
        "/v1/completions", json=GOOD_BODY, headers={"x-large": "x" * 2**17}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (431, 431)
    await endpoints.check_nothing_is_left()


async def test_what_is_no_http(endpoints: Endpoints) -> None:
    host, _, port = endpoints.router.http.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x16\x03\x01\x02\x00 this is not HTTP\r\n\r\n")
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 400
    writer.close()
    await endpoints.check_nothing_is_left()


async def test_what_a_message_cannot_ask_for(endpoints: Endpoints) -> None:
    """Templates, KV handles, workers' addresses and tensors have no field over gRPC, and none may
    be added unseen.
    """
    assert set(pb.GenerateRequest.DESCRIPTOR.fields_by_name) == {
        *(
            "request_id",
            "model",
            "prompt",
            "messages",
            "token_ids",
            "sampling",
            "priority",
            "resume",
        ),
        "system_fingerprint",  # which is compared, and chooses nothing that resume alone would not
        "slo",  # of which only values count that leave more to others than the cluster's
        "cache_salt",  # which is mixed with the tenant's salt and cannot reach another tenant's
    }
    assert set(pb.ChatMessage.DESCRIPTOR.fields_by_name) == {"role", "content"}
    unknown = request_to_proto(GOOD).SerializeToString() + b"\xa2\x06\x08decode-0"  # field 100
    parts = await endpoints.generate(unknown)
    assert [one for part in parts for one in part.token_ids] == answer(PROMPT, 7, 3)
