"""A pickle that would leave a mark is sent to every port and given to every parser: none unpickles
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
import redis.asyncio
import xxhash
from bad_input.bomb import Bomb, filled
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from safetensors.torch import load_file, save_file
from support.listening import listening
from support.router_harness import DEMO, running_router
from support.transfer_ends import HASH, KEY, LAYOUT, SENDER, MemoryFile, decode_end, sender_of
from support.worker_harness import workers

from kvrelay.config.config_file import load_config, load_policy
from kvrelay.config.model_sections import ModelConfig
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.model.loader import load_model
from kvrelay.errors import InvalidArgument, KvRelayError, ModelRefused
from kvrelay.loadtest.lengths import Uniform
from kvrelay.loadtest.report.report_file import load
from kvrelay.loadtest.traces.trace_file import read_trace
from kvrelay.state.embedded_redis import EmbeddedRedis
from kvrelay.state.registry import Registry
from kvrelay.tokenizer.chat_template import ChatTemplate
from kvrelay.tokenizer.tokenizer import Tokenizer
from kvrelay.wire import cluster, inference, transfer, worker
from kvrelay.wire.transfer import KvBlocks, KvCommit, KvOpen, commit_digest, frame_to_bytes, kv_push
from router.frontend.model_card import ModelCard

CONFIG = ClusterConfig.model_validate({"kv": {"block_size": 8, "memory": "4MiB"}})
METHODS = [
    method
    for stubs in (inference.pb, cluster.pb, worker.pb, transfer.pb)
    for service in stubs.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


@pytest.fixture
def bomb(tmp_path: Path) -> Iterator[Bomb]:
    """One that does go off where it is unpickled, and that has not gone off in the end."""
    made = Bomb(tmp_path / "mark")
    assert made.armed()
    yield made
    assert not made.mark.exists(), "it was unpickled"


async def test_ports(tiny_model: Callable[..., Path], bomb: Bomb) -> None:
    """All of a router, of workers, of hand-offs and of their groups, as bytes and as gRPC
    messages.
    """
    async with (
        workers(tiny_model("llama"), CONFIG, "prefill-0", "decode-0") as running,
        running_router() as router,
        decode_end() as decode,
        sender_of(MemoryFile()) as sender,
    ):
        # Opens the store and a group's sockets
        push = sender.open(KEY, decode.grant([1, 2], transport="gloo"))
        push.send(0, [5, 6])
        await push.commit(1, 8, 0.0)
        fakes = {int(one.worker.info.address.rpartition(":")[2]) for one in router.workers.values()}
        ports = {port for port in listening() if port[1] not in fakes}
        assert len(ports) >= 7, "router 3, workers 2, receiver, store"
        await asyncio.gather(*(_as_bytes(port, data) for port in ports for data in bomb.forms()))
        await asyncio.gather(*(_as_messages(port, bomb) for port in ports))

        again = sender.open((KEY[0], 1), decode.grant([3, 4], key=(KEY[0], 1), transport="gloo"))
        again.send(0, [5, 6])
        await again.commit(1, 8, 0.0)
        for name in ("prefill-0", "decode-0"):
            await running.session(name)
        async with httpx.AsyncClient(base_url=router.http, timeout=60) as http:
            good = await http.post("/v1/completions", json={"prompt": [10, 11], "max_tokens": 2})
        assert good.status_code == 200


async def _as_bytes(port: tuple[str, int], data: bytes) -> None:
    reader, writer = await asyncio.open_connection(*port)
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(0.5):
            writer.write(data)
            writer.write_eof()
            await reader.read()
    writer.transport.abort()


async def _as_messages(port: tuple[str, int], bomb: Bomb) -> None:
    """To every method of every service: whatever is not there says so."""
    async with grpc.aio.insecure_channel(f"{port[0]}:{port[1]}") as channel:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await channel.channel_ready()
                await asyncio.gather(*(_call(channel, method, bomb) for method in METHODS))


async def _call(channel: grpc.aio.Channel, method: MethodDescriptor, bomb: Bomb) -> None:
    kind = message_factory.GetMessageClass(method.input_type)
    messages = [*bomb.forms()[:2], *(one.SerializeToString() for one in filled(kind, bomb))]
    name = f"/{method.containing_service.full_name}/{method.name}"
    spoken = [[one] for one in messages]
    if name.endswith("/Session"):
        hello = worker.command_to_proto(worker.Hello("router-1")).SerializeToString()
        spoken += [[hello, one] for one in messages]
    await asyncio.gather(*(_speak(channel, name, one) for one in spoken))


async def _speak(channel: grpc.aio.Channel, name: str, messages: list[bytes]) -> None:
    call = channel.stream_stream(name)(timeout=0.5)
    # The latter: it is over already
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for one in messages:
            await call.write(one)
        while await call.read() is not grpc.aio.EOF:
            pass


async def test_kv_that_is_a_pickle_is_kv(bomb: Bomb) -> None:
    payload = bomb.forms()[2].ljust(LAYOUT.block_bytes, b"\0")
    digest = xxhash.xxh3_64_intdigest(payload)
    async with decode_end() as decode, grpc.aio.insecure_channel(decode.address) as channel:
        target = decode.grant([3])
        frames = (
            KvOpen(
                *(*KEY, target.lease_id, target.epoch, target.generation, HASH, "grpc"),
                sender=SENDER,
                capability=target.capability,
            ),
            KvBlocks(0, 0, 1, 0, len(LAYOUT.layers), len(payload), (digest,), (payload,)),
            KvCommit(
                1,
                commit_digest(xxhash.xxh3_64(digest.to_bytes(8, "little")), 5, LAYOUT.block_size),
                5,
                LAYOUT.block_size,
            ),
        )
        await kv_push(channel)(map(frame_to_bytes, frames))
        assert decode.arena.block(3) == payload


async def test_http_routes(bomb: Bomb) -> None:
    async with (
        running_router() as router,
        httpx.AsyncClient(base_url=router.http, timeout=60) as http,
    ):
        routes = [
            (path, method.upper())
            for path, of in (await http.get("/openapi.json")).json()["paths"].items()
            for method in of
        ]
        assert len(routes) >= 8
        for path, method in routes:
            for kind in ("application/json", "application/x-pickle"):
                for data in (*bomb.forms()[:3], bomb.as_checkpoint):
                    answer = await http.request(
                        method,
                        path.replace("{id}", "x"),
                        content=data,
                        headers={"content-type": kind},
                    )
                    assert answer.status_code < 500
        for name in (
            "prompt",
            "prompt_embeds",
            "multi_modal_data",
            "kv_transfer_params",
            "user",
            "model",
        ):
            for form in (
                bomb.text,
                bomb.forms()[5].decode(),
                {"__reduce__": bomb.text},
                [bomb.text],
            ):
                answer = await http.post(
                    "/v1/completions", json={"prompt": "a", "max_tokens": 1, name: form}
                )
                assert answer.status_code in (200, 400, 403, 404, 501)


async def test_values_in_redis(bomb: Bomb) -> None:
    async with EmbeddedRedis() as server, await Registry.connect(server.url) as registry:
        client = redis.asyncio.Redis.from_url(server.url)
        try:
            for data in bomb.forms():
                for key in ("worker:decode-0", "router:router-0", "leader", "epoch", "term"):
                    await client.set(f"kvrelay:{key}", data)
                await client.hset("kvrelay:desired", "decode", data)
                await client.sadd("kvrelay:drains", data)
                await client.lpush("kvrelay:decisions", data)
                assert (
                    await registry.workers()
                    == await registry.routers()
                    == await registry.decisions()
                    == ()
                )
                assert await registry.desired() == {}
                assert await registry.drains() == frozenset()
                for call in (
                    registry.next_epoch(),
                    registry.renew_lease("a", 0),
                    registry.release_lease("a"),
                ):
                    with contextlib.suppress(KvRelayError):  # a counter that is none
                        await call
                await client.flushall()
        finally:
            await client.aclose()


def test_files_that_people_write(bomb: Bomb, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in bomb.forms():
        path.write_bytes(data)
        for read in (load_config, load_policy, load):
            with pytest.raises(InvalidArgument):
                read(path)
        for form in ("mooncake", "azure", "servegen"):
            with pytest.raises(InvalidArgument):
                list(read_trace(path, form, 0, 0.0, Uniform(1, 1), Uniform(1, 1)))


def test_model_folders(bomb: Bomb, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Pickles in the place of each file, under the names that pickles have, and in the metadata of
    good weights.
    """
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(), folder)
    shutil.copy(Path(DEMO, "tokenizer.json"), folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt", "bomb": bomb.text})
    for name in (
        "pytorch_model.bin",
        "model.pt",
        "optimizer.pth",
        "training_args.bin",
        "scheduler.ckpt",
        "weights.pkl",
    ):
        (folder / name).write_bytes(bomb.as_checkpoint)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(
        f"from pathlib import Path\nPath({str(bomb.mark)!r}).touch()\n"
    )
    load_model(str(folder))  # the metadata is not looked into, the others are not opened
    for name in (
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        good = (folder / name).read_bytes() if (folder / name).exists() else b"{}"
        for data in (bomb.forms()[2], bomb.as_checkpoint):
            (folder / name).write_bytes(data)
            refused = 0
            for read in (_whole, _card, Tokenizer.load, ChatTemplate.load):
                try:
                    read(folder)
                except ModelRefused:
                    refused += 1
                except KvRelayError:
                    continue
            assert refused, f"{name} was taken"
        (folder / name).write_bytes(good)
    index = {"weight_map": dict.fromkeys(weights, "pytorch_model.bin")}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ModelRefused,
        match=r"pytorch_model\.bin' is not the name of a safetensors "
        r"file",
    ):
        load_model(str(folder))


def _whole(folder: Path) -> None:
    load_model(str(folder))


def _card(folder: Path) -> None:
    ModelCard.load(str(folder), ModelConfig())
