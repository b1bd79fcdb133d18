"""Who gets in at a router's endpoints: every route and every method, asked with no token, a wrong
one, a wrong role.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from starlette.applications import Starlette
from starlette.routing import Route
from structlog.testing import capture_logs
from support.router_harness import RouterHarness, running_router
from support.tokens import Tokens, bearer

import kvrelay
import router.frontend.access
import router.main
from kvrelay.client.admin import AdminClient
from kvrelay.wire.cluster import ClusterServiceStub
from kvrelay.wire.cluster import pb as cluster_pb2

OPEN_PATHS = {"/health", "/"}  # and the files of the page
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
CLIENT_PATHS = {
    "/v1/models",
    "/v1/models/demo",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
}
Messages = tuple[tuple[str, str], ...]


@dataclass
class Cluster:
    router: RouterHarness
    app: Starlette
    tokens: Tokens
    client: str  # its tokens
    admin: str


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    apps: list[Starlette] = []

    def build(*arguments: Any) -> Starlette:
        apps.append(build_app(*arguments))
        return apps[0]

    build_app = router.main.build_app
    monkeypatch.setattr(router.main, "build_app", build)
    monkeypatch.setattr(router.frontend.access, "POLL_S", 0.01)
    tokens = Tokens(tmp_path / "tokens.yaml")
    client = tokens.add("acme")
    admin = tokens.add("ops", roles=["admin"])
    async with running_router(tokens_file=tokens.path) as running:
        yield Cluster(running, apps[0], tokens, client, admin)


def routes(app: Starlette) -> Iterator[tuple[str, str]]:
    """(method, path) of each."""
    for route in app.routes:
        assert isinstance(route, Route)
        assert route.methods
        for method in route.methods:
            yield method, route.path.replace("{id:path}", "demo")


def check_refusal(response: httpx.Response, status: int, kind: str, has_body: bool) -> None:
    assert response.status_code == status
    assert response.headers["x-request-id"]
    if has_body:
        error = response.json()["error"]
        if response.url.path.startswith("/v1/messages"):
            assert (response.json()["type"], error["type"]) == ("error", kind)
        else:
            assert (error["type"], error["code"], error["param"]) == (kind, status, None)
        assert "kvr_" not in error["message"]


async def test_a_token_may_come_in_the_header_of_anthropics_clients(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.router.http, timeout=60) as http:
        response = await http.get("/v1/models", headers={"x-api-key": cluster.client})
    assert response.status_code == 200


async def test_every_route_refuses_who_has_no_token_or_the_wrong_one(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.router.http, timeout=60) as http:
        asked = 0
        for method, path in routes(cluster.app):
            if path in OPEN_PATHS or path.startswith("/page/"):
                assert (await http.request(method, path)).status_code == 200
                continue
            asked += 1
            stranger = Tokens(cluster.tokens.path.with_name("other.yaml")).add("acme")
            headers: list[dict[str, str] | list[tuple[str, str]]] = [
                {},
                bearer(stranger),
                bearer(cluster.client[:-1]),
                bearer(cluster.client + "x"),
                {"authorization": cluster.client},
                {"authorization": f"Basic {cluster.client}"},
                {"authorization": "Bearer"},
                {"authorization": "Bearer " + "x" * 5000},
                {"x-api-key": stranger},
                {"x-api-key": f"Bearer {cluster.client}"},
                # The header authorization counts where both are sent.
                {"x-api-key": cluster.client} | bearer(stranger),
                [("x-api-key", cluster.client), ("x-api-key", cluster.client)],
                [
                    ("authorization", f"Bearer {cluster.client}"),
                    ("authorization", f"Bearer {stranger}"),
                ],
            ]
            for one in headers:
                response = await http.request(method, path, headers=one)
                assert response.status_code == 401, (method, path, one)
                check_refusal(response, 401, "authentication_error", has_body=method != "HEAD")
                assert response.headers["www-authenticate"] == "Bearer"
        assert asked >= 14  # of which four are asked by HEAD as well
        for path in ("/nothing", "/page/nothing.js", "/health/", "//health", "/healthz"):
            # As it is written
            url = httpx.URL(cluster.router.http).copy_with(raw_path=path.encode())
            # Strangers do not learn what there is
            assert (await http.get(url)).status_code == 401, path


async def test_every_route_takes_the_right_role_only(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.router.http, timeout=60) as http:
        seen = set()
        for method, path in routes(cluster.app):
            as_client = await http.request(method, path, headers=bearer(cluster.client))
            assert as_client.status_code in (200, 400), (method, path)
            as_admin = await http.request(method, path, headers=bearer(cluster.admin))
            if path in CLIENT_PATHS:
                seen.add(path)
                check_refusal(as_admin, 403, "permission_error", has_body=method != "HEAD")
            else:
                assert as_admin.status_code == 200
        assert seen == CLIENT_PATHS


async def methods(target: str, token: str) -> list[str]:
    """Paths of all methods of a listener, as its reflection tells them."""
    request = reflection_pb2.ServerReflectionRequest
    async with grpc.aio.insecure_channel(target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(metadata=metadata(token))
        await call.write(request(list_services=""))
        services = [one.name for one in (await call.read()).list_services_response.service]
        found = []
        for name in services:
            await call.write(request(file_containing_symbol=name))
            for raw in (await call.read()).file_descriptor_response.file_descriptor_proto:
                file = descriptor_pb2.FileDescriptorProto.FromString(raw)
                for service in file.service:
                    if f"{file.package}.{service.name}" == name:
                        found += [f"/{name}/{one.name}" for one in service.method]
        await call.done_writing()
    return found


def metadata(token: str) -> Messages:
    return (("authorization", f"Bearer {token}"),)


async def code(
    channel: grpc.aio.Channel, path: str, sent: Messages, *, send: bool = True
) -> grpc.StatusCode:
    """Of a call with an empty message, or with none at all; OK also for a stream that goes on."""
    call = (
        channel.unary_stream(path)(b"", metadata=sent)
        if send
        else channel.stream_stream(path)(metadata=sent)
    )
    try:
        async with asyncio.timeout(60):
            return await call.code() if await call.read() is grpc.aio.EOF else grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()


async def test_every_rpc_refuses_who_has_no_token_or_the_wrong_one_or_the_wrong_role(
    cluster: Cluster,
) -> None:
    endpoints = {
        cluster.router.grpc: (
            cluster.client,
            cluster.admin,
            {f"InferenceService/{one}" for one in ("Generate", "ListModels")},
        ),
        cluster.router.admin: (
            cluster.admin,
            cluster.client,
            {
                f"ClusterService/{one}"
                for one in (
                    "GetStatus",
                    "WatchStatus",
                    "SetPoolSize",
                    "DrainWorker",
                    "RestartWorkers",
                    "ListAdapters",
                    "LoadAdapter",
                    "UnloadAdapter",
                )
            },
        ),
    }
    for target, (right, wrong, expected) in endpoints.items():
        paths = await methods(target, right)
        health = {f"/grpc.health.v1.Health/{one}" for one in ("Check", "Watch")}
        reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        assert set(paths) == {f"/kvrelay.v1.{one}" for one in expected} | {reflection} | health
        async with grpc.aio.insecure_channel(target) as channel:
            for path in paths:
                if path == HEALTH_CHECK:
                    continue
                refusals: list[Messages] = [
                    (),
                    metadata(right[:-1]),
                    metadata(right + "x"),
                    (("authorization", right),),
                    (("authorization", f"Basic {right}"),),
                    metadata(right) + metadata(wrong),
                    (("x-api-key", right),),
                ]
                for sent in refusals:
                    assert await code(channel, path, sent) is grpc.StatusCode.UNAUTHENTICATED, (
                        path,
                        sent,
                    )
                assert (
                    await code(channel, path, metadata(wrong)) is grpc.StatusCode.PERMISSION_DENIED
                ), path
                found = await code(channel, path, metadata(right))
                assert found not in (
                    grpc.StatusCode.UNAUTHENTICATED,
                    grpc.StatusCode.PERMISSION_DENIED,
                ), path
            # A stranger who sends no message holds nothing open, and does not learn what there is.
            for path in (
                "/kvrelay.v1.InferenceService/Generate",
                "/kvrelay.v1.ClusterService/GetStatus",
            ):
                assert await code(channel, path, (), send=False) is grpc.StatusCode.UNAUTHENTICATED
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest()
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_clients_with_a_token_are_served_and_told_apart(cluster: Cluster) -> None:
    other = cluster.tokens.add("other")
    async with (
        until_taken(cluster, other),
        kvrelay.AsyncClient(cluster.router.grpc, token=cluster.client) as ours,
        kvrelay.AsyncClient(cluster.router.grpc, token=other) as theirs,
    ):
        for name in ("prefill-0", "decode-0"):
            cluster.router.workers[name].may_step.clear()
        # One id, two tenants, at one time: neither collides with the other, each is told its own.
        flying = [
            asyncio.create_task(
                client.generate(token_ids=[11, 12], max_tokens=4, request_id="same").result()
            )
            for client in (ours, theirs)
        ]
        async with asyncio.timeout(60):
            while len(cluster.router.workers["decode-0"].worker.sequences) < 2:
                await asyncio.sleep(0.01)
        with pytest.raises(kvrelay.FailedPrecondition, match="'same' is used"):
            await ours.generate(token_ids=[11, 12], max_tokens=4, request_id="same")
        async with httpx.AsyncClient(base_url=cluster.router.http, timeout=60) as http:
            for token, expected in (
                (cluster.client, [("acme", "same")]),
                (other, [("other", "same")]),
                (cluster.admin, [("acme", "same"), ("other", "same")]),
            ):
                rows = (await http.get("/status.json", headers=bearer(token))).json()["requests"]
                assert sorted((row["tenant"], row["id"]) for row in rows) == expected
            flying[0].cancel()  # one tenant's cancellation is not the other's
            for name in ("prefill-0", "decode-0"):
                cluster.router.workers[name].may_step.set()
            answer = await flying[1]
            assert (answer.request_id, len(answer.token_ids)) == ("same", 4)
            async with asyncio.timeout(60):
                while True:
                    rows = (await http.get("/status.json", headers=bearer(cluster.client))).json()[
                        "requests"
                    ]
                    if [(row["tenant"], row["state"]) for row in rows] == [("acme", "cancelled")]:
                        break
                    await asyncio.sleep(0.05)


@asynccontextmanager
async def until_taken(cluster: Cluster, token: str) -> AsyncIterator[None]:
    """The router has read the file with this token."""
    async with (
        httpx.AsyncClient(base_url=cluster.router.http, timeout=60) as http,
        asyncio.timeout(60),
    ):
        while (await http.get("/version", headers=bearer(token))).status_code == 401:
            await asyncio.sleep(0.01)
    yield


async def status_of(http: httpx.AsyncClient, token: str) -> int:
    return (await http.get("/v1/models", headers=bearer(token))).status_code


async def trouble(cluster: Cluster) -> str:
    """What the router tells operators to mend."""
    async with grpc.aio.insecure_channel(cluster.router.admin) as channel:
        as_admin = (("authorization", f"Bearer {cluster.admin}"),)
        status = await ClusterServiceStub(channel).GetStatus(
            cluster_pb2.GetStatusRequest(), metadata=as_admin
        )
    return str(status.router.certificate_note)


async def test_the_file_is_read_again_and_a_broken_one_changes_nothing(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.router.http, timeout=60) as http:
        assert await status_of(http, cluster.client) == 200
        new = cluster.tokens.add("acme")  # in place of the one before
        async with asyncio.timeout(60):
            while await status_of(http, new) != 200:
                await asyncio.sleep(0.01)
        assert await status_of(http, cluster.client) == 401
        with capture_logs() as logs:
            cluster.tokens.path.write_text("tenants: [")
            async with asyncio.timeout(60):
                while not any(line["log_level"] == "error" for line in logs):
                    await asyncio.sleep(0.01)
            assert await status_of(http, new) == 200
            assert f"{cluster.tokens.path}:1: " in await trouble(cluster)
            cluster.tokens.path.unlink()
            async with asyncio.timeout(60):
                while sum(line["log_level"] == "error" for line in logs) < 2:
                    await asyncio.sleep(0.01)
            assert await status_of(http, new) == 200
        first = next(line for line in logs if line["log_level"] == "error")
        assert first["event"] == "tokens_file_rejected"
        assert first["reason"].startswith(f"{cluster.tokens.path}:1: ")
        assert "kvr_" not in str(logs)
        # The file may be read while it is written, and again before the metric is.
        errors = sum(line["log_level"] == "error" for line in logs)
        text = (await http.get("/metrics", headers=bearer(cluster.admin))).text
        counted = re.search(r'tokens_file_errors_total\{model_name="demo"\} (\S+)', text)
        assert counted is not None
        assert float(counted[1]) >= errors
        cluster.tokens.remove("acme")
        async with asyncio.timeout(60):
            while await status_of(http, new) != 401:
                await asyncio.sleep(0.01)
        assert await trouble(cluster) == ""


async def test_nobody_goes_before_all_others_unasked(cluster: Cluster) -> None:
    usual = cluster.tokens.add("usual")
    urgent = cluster.tokens.add("urgent", min_priority=-5)
    body = {"model": "demo", "prompt": [11, 12, 13], "max_tokens": 2}
    async with (
        until_taken(cluster, urgent),
        httpx.AsyncClient(base_url=cluster.router.http, timeout=60) as http,
    ):
        for token, priority, status in (
            (usual, 0, 200),
            (usual, -1, 403),
            (urgent, -5, 200),
            (urgent, -6, 403),
        ):
            answer = await http.post(
                "/v1/completions", json=body | {"priority": priority}, headers=bearer(token)
            )
            assert answer.status_code == status, (priority, answer.text)
        error = answer.json()["error"]
        assert error["param"] == "priority"
        assert error["message"].startswith("priority -6 is below the minimum -5 of tenant urgent")


async def test_each_choice_counts_as_a_request(cluster: Cluster) -> None:
    token = cluster.tokens.add("small", requests_per_minute=3)
    body = {"model": "demo", "prompt": [11, 12, 13], "max_tokens": 2}
    async with (
        until_taken(cluster, token),
        httpx.AsyncClient(base_url=cluster.router.http, timeout=60) as http,
    ):
        for n, status in ((4, 400), (2, 200), (2, 429), (1, 200)):
            answer = await http.post("/v1/completions", json=body | {"n": n}, headers=bearer(token))
            assert answer.status_code == status, (n, answer.text)


async def test_a_tenant_over_its_limits_is_told_when_to_come_back(cluster: Cluster) -> None:
    token = cluster.tokens.add("small", requests_per_minute=2, tokens_per_minute=30)
    body = {"model": "demo", "prompt": [11, 12, 13], "max_tokens": 8}
    async with (
        until_taken(cluster, token),
        httpx.AsyncClient(base_url=cluster.router.http, timeout=60) as http,
    ):
        assert (
            await http.post("/v1/completions", json=body, headers=bearer(token))
        ).status_code == 200
        refused = await http.post(
            "/v1/completions", json=body | {"max_tokens": 20}, headers=bearer(token)
        )
        assert refused.status_code == 429  # 11 of 30 tokens are used
        assert (
            refused.json()["error"]["message"]
            == "tenant small has used its limit of 30 tokens per minute; retry later"
        )
        assert 1 <= int(refused.headers["retry-after"]) <= 8
        refused = await http.post("/v1/completions", json=body, headers=bearer(token))
        assert (
            refused.json()["error"]["message"]
            == "tenant small has used its limit of 2 requests per minute; retry later"
        )
        assert 25 <= int(refused.headers["retry-after"]) <= 30
        policy = kvrelay.RetryPolicy(max_attempts=1)
        async with kvrelay.AsyncClient(cluster.router.grpc, token=token, retry=policy) as client:
            with pytest.raises(kvrelay.ResourceExhausted, match="2 requests per minute") as caught:
                await client.generate(token_ids=[11])
            assert caught.value.retry_after_s is not None
            assert 25 <= caught.value.retry_after_s <= 30
        async with kvrelay.AsyncClient(cluster.router.grpc, token=cluster.client) as client:
            # Nobody else is held up
            assert (await client.generate(token_ids=[11], max_tokens=2)).token_ids
        text = (await http.get("/metrics", headers=bearer(cluster.admin))).text
        for line in (
            'kvrelay_tenant_refusals_total{limit="requests",model_name="demo",tenant="small"} 2.0',
            'kvrelay_tenant_refusals_total{limit="tokens",model_name="demo",tenant="small"} 1.0',
            "kvrelay_tenant_requests_total"
            '{finished_reason="length",model_name="demo",tenant="small"} 1.0',
            'kvrelay_tenant_tokens_total{kind="prompt",model_name="demo",tenant="small"} 3.0',
            'kvrelay_tenant_tokens_total{kind="generation",model_name="demo",tenant="small"} 8.0',
        ):
            assert line in text
        own = (await http.get("/metrics", headers=bearer(token))).text
        assert set(re.findall('tenant="([^"]*)"', own)) == {"small"}
        cluster.tokens.remove("small")
        async with asyncio.timeout(60):
            while (
                'tenant="small"' in (await http.get("/metrics", headers=bearer(cluster.admin))).text
            ):
                await asyncio.sleep(0.01)


async def test_logs_name_the_tenant_and_never_a_token(cluster: Cluster) -> None:
    with capture_logs() as logs:
        async with httpx.AsyncClient(base_url=cluster.router.http, timeout=60) as http:
            body = {"model": "demo", "prompt": [11, 12, 13], "max_tokens": 2}
            headers = bearer(cluster.client) | {"x-request-id": "mine"}
            assert (
                await http.post("/v1/completions", json=body, headers=headers)
            ).status_code == 200
            assert (
                await http.get("/v1/models", headers=bearer(cluster.client + "x"))
            ).status_code == 401
            async with asyncio.timeout(60):
                while not any(one["event"] == "unknown_tokens_refused" for one in logs):
                    await asyncio.sleep(0.01)
    (line,) = [one for one in logs if one["event"] == "request_ended"]
    assert (line["tenant"], line["request"]) == ("acme", "mine")
    assert cluster.client not in str(logs)


async def test_the_operators_client_shows_its_token(cluster: Cluster) -> None:
    def look(token: str | None) -> str:
        with AdminClient(cluster.router.admin, token=token) as admin:
            admin.set_pool_size(decode=2)
            admin.drain("decode-0")
            next(admin.watch(0.1))
            return admin.status().model

    assert await asyncio.to_thread(look, cluster.admin) == "demo"
    with pytest.raises(kvrelay.Unauthenticated):
        await asyncio.to_thread(look, None)
    with pytest.raises(kvrelay.PermissionDenied):
        await asyncio.to_thread(look, cluster.client)


async def test_workers_get_the_tenants_salt(cluster: Cluster) -> None:
    other = cluster.tokens.add("other")
    seen: dict[str, str] = {}
    async with until_taken(cluster, other):
        for name, token in (("acme", cluster.client), ("other", other)):
            cluster.router.workers["decode-0"].may_step.clear()
            async with kvrelay.AsyncClient(cluster.router.grpc, token=token) as client:
                flying = asyncio.create_task(
                    client.generate(token_ids=[11, 12, 13], max_tokens=2).result()
                )
                async with asyncio.timeout(60):
                    while not (taken := cluster.router.workers["decode-0"].worker.sequences):
                        await asyncio.sleep(0.01)
                seen[name] = next(iter(taken.values())).spec.salt
                cluster.router.workers["decode-0"].may_step.set()
                await flying
    assert all(len(one) == 64 for one in seen.values())
    assert len(set(seen.values())) == 2
