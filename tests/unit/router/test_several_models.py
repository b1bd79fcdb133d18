"""A router of several models: requests, operators' calls and metrics find theirs by its name."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.fake_worker import FakeWorkerServer
from support.router_harness import (
    DEMO,
    MemoryRegistry,
    RouterHarness,
    cluster_config,
    inference_stub,
    router_before,
)
from unit.router.test_end_to_end import collect

from kvrelay.cli.main import run
from kvrelay.client.admin import AdminClient
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from kvrelay.process.stop_request import StopRequest
from kvrelay.wire.inference import GenerateRequest, SamplingOptions, models_from_proto, pb
from router.frontend.model_card import ModelCard
from router.frontend.tokenization import Text
from router.main import run_router
from router.served_model import LoadedModel

# The stack of a stall has a line of its own.
LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:(?:.*event_loop_stalled.*\n)?.*\n", re.MULTILINE)
NAMES = ("small", "large", "idle")
PROMPT = tuple(range(10, 30))


@dataclass
class Routers:
    """One router; each model has workers of its own."""

    models: dict[str, RouterHarness]

    @property
    def first(self) -> RouterHarness:
        return self.models["small"]

    def admin(self, model: str = "") -> AdminClient:
        return AdminClient(self.first.admin, model=model)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Routers]:
    """Models small and large, each with a worker that writes its own token, and idle without. The
    policy of idle is in the folder.
    """
    policy = folder / "policy.yaml"
    policy.write_text("decode: {min_replicas: 0, metrics: [{name: queue_depth, target: 2}]}\n")
    config = ClusterConfig.model_validate(
        {
            "prefill": {"replicas": 0},
            "listen": {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "admin": "127.0.0.1:0"},
            "models": {
                "small": {"prefill": {"replicas": 0}},
                "large": {"prefill": {"replicas": 0}, "model": {"max_model_len": 512}},
                "idle": {
                    "prefill": {"replicas": 0},
                    "decode": {"replicas": 0},
                    "autoscaling": str(policy),
                },
            },
        }
    )
    stop, text = StopRequest(), Text.load(DEMO)
    line: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    loaded = [
        LoadedModel(one, MemoryRegistry(), ModelCard.load(DEMO, one.model), text)
        for one in config.served
    ]
    task = asyncio.create_task(run_router(config, loaded, line.set_result, stop))
    task.add_done_callback(lambda _: line.done() or line.cancel())
    models = {
        name: RouterHarness(one.registry, {}, stop, task)  # type: ignore[arg-type]
        for name, one in zip(NAMES, loaded, strict=True)
    }
    try:
        for number, name in enumerate(("small", "large")):
            await models[name].add(f"{name}.decode-0", "decode")
            models[name].say((20 + number,) * 4)
        words = dict(word.split("=", 1) for word in (await line).split()[2:])
        for one in models.values():
            one.grpc, one.http, one.admin = words["grpc"], words["http"], words["admin"]
        yield Routers(models)
    finally:
        stop()
        stop()
        await asyncio.wait({task}, timeout=10)
        for one in models.values():
            for server in list(one.workers.values()):
                await server.kill()
        await text.close()
        await task


@pytest.fixture
async def routers(tmp_path: Path) -> AsyncIterator[Routers]:
    async with running(tmp_path) as made:
        yield made


def ask(model: str, tokens: int = 4) -> GenerateRequest:
    options = SamplingOptions(max_tokens=tokens, ignore_eos=True)
    return GenerateRequest(model=model, token_ids=PROMPT, sampling=options)


async def tokens_over_grpc(routers: Routers, model: str) -> list[int]:
    async with inference_stub(routers.first.grpc) as stub:
        answers = await collect(stub, ask(model))
    return [token for one in answers for token in one.token_ids]


async def post(routers: Routers, path: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=routers.first.http, timeout=30) as http:
        return await http.post(path, json=body)


async def get(routers: Routers, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=routers.first.http, timeout=30) as http:
        return await http.get(path)


async def in_thread(call: Any, *arguments: Any, **options: Any) -> Any:
    return await asyncio.to_thread(lambda: call(*arguments, **options))


async def test_a_request_runs_on_the_workers_of_its_model(routers: Routers) -> None:
    for number, name in enumerate(("small", "large")):
        assert await tokens_over_grpc(routers, name) == [20 + number] * 4
        for path, source in (
            ("/v1/completions", {"prompt": list(PROMPT)}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ):
            done = await post(
                routers, path, model=name, max_tokens=4, return_token_ids=True, **source
            )
            assert done.json()["choices"][0]["token_ids"] == [20 + number] * 4
            assert done.json()["model"] == name


@pytest.mark.parametrize(
    ("model", "status", "says"),
    [
        ("", 400, "model is missing, and this cluster serves 'small', 'large', 'idle'; name one"),
        ("larg", 404, "model 'larg' does not exist; this cluster serves 'small', 'large', 'idle'"),
        ("x" * 100_000, 404, "does not exist"),
    ],
    ids=["none", "near", "long"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.sweep(3)
async def test_a_name_that_no_model_has(
    routers: Routers, model: str, status: int, says: str, path: str
) -> None:
    source = {"tokens": [1]} if path == "/detokenize" else {"prompt": "Hi"}
    refused = await post(routers, path, **source, **({"model": model} if model else {}))
    assert refused.status_code == status
    assert says in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "model"
    assert len(refused.content) < 1000


async def test_every_model_is_listed(routers: Routers) -> None:
    listed = (await get(routers, "/v1/models")).json()["data"]
    assert [(one["id"], one["max_model_len"]) for one in listed] == [
        ("small", 4096),
        ("large", 512),
        ("idle", 4096),
    ]
    assert (await get(routers, "/v1/models/large")).json()["max_model_len"] == 512
    assert (await get(routers, "/v1/models/nobody")).status_code == 404
    async with inference_stub(routers.first.grpc) as stub:
        found = models_from_proto(await stub.ListModels(pb.ListModelsRequest()))
    assert [one.id for one in found] == list(NAMES)


async def test_an_empty_pool_waits_for_its_first_request(routers: Routers) -> None:
    assert (await get(routers, "/health")).status_code == 200
    waiting = asyncio.create_task(tokens_over_grpc(routers, "idle"))
    with routers.admin("idle") as client:
        while not (await in_thread(client.status)).router.waiting:
            await asyncio.sleep(0.01)
        assert await in_thread(client.set_pool_size, decode=0) == (0, 0)
    # The other models serve meanwhile.
    assert await tokens_over_grpc(routers, "small") == [20] * 4
    await routers.models["idle"].add("idle.decode-0", "decode")
    routers.models["idle"].say((22,) * 4)
    assert await asyncio.wait_for(waiting, 30) == [22] * 4


async def test_the_loss_of_all_workers_of_a_model_leaves_the_others_alone(
    routers: Routers,
) -> None:
    await routers.models["large"].kill("large.decode-0")
    with routers.admin("large") as client:
        while (await in_thread(client.status)).state == "ready":
            await asyncio.sleep(0.01)
    assert (await get(routers, "/health")).json() == {"status": "ready"}
    assert await tokens_over_grpc(routers, "small") == [20] * 4


async def test_operators_name_the_model(routers: Routers) -> None:
    with routers.admin() as client:
        status = await in_thread(client.status)
        assert (status.model, status.models) == ("small", NAMES)
        for call in (
            lambda: client.set_pool_size(decode=2),
            lambda: client.restart("decode"),
            lambda: client.restart("small.decode-0", "large.decode-0"),
        ):
            with pytest.raises(InvalidArgument, match="model is missing"):
                await in_thread(call)
        # A worker's name is unique in the cluster.
        assert await in_thread(client.restart, "small.decode-0") == ("small.decode-0",)
        await in_thread(client.drain, "large.decode-0")
        with pytest.raises(NotFound, match=r"small\.decode-0"):
            await in_thread(client.drain, "medium.decode-0")
    assert routers.models["large"].registry.drains == ["large.decode-0"]
    assert not routers.models["small"].registry.drains
    with routers.admin("large") as client:
        assert (await in_thread(client.status)).model == "large"
        assert await in_thread(client.set_pool_size, decode=3) == (0, 3)
        assert await in_thread(client.restart) == ("large.decode-0",)
        with pytest.raises(InvalidArgument, match="allowed are 1 to"):
            await in_thread(client.set_pool_size, decode=0)
    assert routers.models["large"].registry.sizes["decode"] == 3
    assert routers.models["small"].registry.sizes.get("decode") != 3
    with routers.admin("medium") as client, pytest.raises(NotFound, match="medium"):
        await in_thread(client.status)


async def test_metrics_have_each_family_once_and_each_model(routers: Routers) -> None:
    for name in ("small", "large", "large"):
        await tokens_over_grpc(routers, name)
    text = (await get(routers, "/metrics")).text
    families = list(text_string_to_metric_families(text))
    assert len({one.name for one in families}) == len(families)
    series = [sample for one in families for sample in one.samples]
    keys = [(one.name, tuple(sorted(one.labels.items()))) for one in series]
    assert len(set(keys)) == len(keys), "each series is there once"
    finished = {
        one.labels["model_name"]: one.value
        for one in series
        if one.name == "kvrelay_request_success_total" and one.labels["finished_reason"] == "stop"
    }
    assert finished == {"small": 1, "large": 2, "idle": 0}
    assert sum(one.name == "process_resident_memory_bytes" for one in series) == 1
    for name in NAMES:
        shown = (await get(routers, f"/status.json?model={name}")).json()
        assert (shown["model"], shown["models"]) == (name, list(NAMES))
        assert shown["worker_prefix"] == f"{name}."
        assert [(one["name"], one["state"]) for one in shown["overview"]] == [
            (one, "ready") for one in NAMES
        ]
        assert [one["pools"][1] for one in shown["overview"]] == [
            {"name": "decode", "ready": size, "size": size} for size in (1, 1, 0)
        ]
    assert (await get(routers, "/status.json")).json()["model"] == "small"
    assert (await get(routers, "/status.json?model=x")).status_code == 404


async def test_the_command_line_shows_all_models_and_changes_one(
    routers: Routers, capsys: pytest.CaptureFixture[str]
) -> None:
    async def shown(*words: str) -> str:
        status = await asyncio.to_thread(run, [*words, "--admin", routers.first.admin])
        out, err = capsys.readouterr()
        assert bool(status) == bool(err), err
        # The routers of this process log, too.
        return LOG_LINE.sub("", out + err)

    status = await shown("status")
    for words in (
        "small: ready",
        "large: ready",
        "idle: ready",
        "large.decode-0",
        "No worker runs.",
    ):
        assert words in status
    assert "small" not in await shown("status", "--model", "idle")
    documents = json.loads(await shown("status", "--json"))
    assert [one["model"] for one in documents] == list(NAMES)
    assert json.loads(await shown("status", "--json", "--model", "large"))["model"] == "large"
    for words in (["scale", "prefill=0"], ["restart"], ["adapters", "load", "x", "x"]):
        assert "'idle'; name one (--model NAME, or model=)\n" in await shown(*words)
    assert "did you mean 'large'" in await shown("status", "--model", "larg")
    assert await shown("scale", "prefill=0", "--model", "large") == "prefill=0 decode=1\n"


async def test_a_router_is_ready_beside_pools_that_have_shrunk(tmp_path: Path) -> None:
    """An operator or a policy has made a pool smaller than it is configured."""
    config = cluster_config(prefill=1, decode=2)
    config = config.model_copy(update=config.with_paths([DEMO]))
    registry = MemoryRegistry()
    await registry.set_desired({"prefill": 0, "decode": 1})
    server = FakeWorkerServer("decode-0", "decode", {}, 1)
    await server.start()
    registry.entries["decode-0"] = server.worker.info
    try:
        async with router_before(config, registry) as addresses, httpx.AsyncClient() as http:
            health = await http.get(f"{addresses['http']}/health")
            assert health.json() == {"status": "ready"}
    finally:
        await server.kill()


async def test_a_request_that_came_and_went_wakes_its_model(routers: Routers) -> None:
    """Its deadline is shorter than the start of a worker."""
    idle = routers.models["idle"].registry
    async with inference_stub(routers.first.grpc) as stub:
        with pytest.raises((Unavailable, DeadlineExceeded)):
            await collect(stub, ask("idle"), timeout_s=0.3)
    async with asyncio.timeout(30):
        while not any(one.waiting for one in idle.published):
            await asyncio.sleep(0.01)
