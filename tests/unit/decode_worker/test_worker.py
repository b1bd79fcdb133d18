"""A decode worker against peers that do not keep to the protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import xxhash
from support.worker_harness import workers

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import Code
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.wire.transfer import KvBlocks, KvCommit, KvOpen, commit_digest, frame_to_bytes, kv_push
from kvrelay.wire.worker import WorkerServiceStub, pb
from kvrelay.worker_messages import Abort, Failed, Prefill, Refused, Reserve, Reserved, RunLocal

CONFIG = ClusterConfig.model_validate(
    {
        "model": {"dtype": "float32"},
        "kv": {"block_size": 8, "memory": "4MiB"},
        "decode": {"max_batch": 4},
    }
)
PROMPT = tuple(range(2, 26))  # three full blocks
NUM_LAYERS = 2


def spec(request_id: str, token_ids: tuple[int, ...] = PROMPT) -> SequenceSpec:
    params = SamplingParams(temperature=0.0, max_tokens=4, seed=1, ignore_eos=True)
    return SequenceSpec(request_id, 0, token_ids, len(token_ids), params)


@pytest.mark.parametrize(
    ("first_token", "num_tokens"), [(10**6, len(PROMPT) + 1), (3, len(PROMPT) + 2)]
)
async def test_a_commit_of_something_else_ends_the_attempt_and_harms_nobody(
    tiny_model: Callable[..., Path], first_token: int, num_tokens: int
) -> None:
    async with workers(tiny_model("llama"), CONFIG, "decode-0") as running:
        decode = await running.session("decode-0")
        # Its blocks stay cached, so that a push has one block to bring
        await decode.send(RunLocal(spec("warm")))
        await decode.answer()
        one = spec("a", (*PROMPT, 30))
        await decode.send(Reserve(one, 10.0, "prefill-0"))
        reserved = await decode.event()
        assert isinstance(reserved, Reserved)
        target = reserved.target
        async with grpc.aio.insecure_channel(decode.info.address) as channel:
            push = kv_push(channel)()
            opening = KvOpen(
                request_id="a",
                attempt=0,
                lease_id=target.lease_id,
                epoch=target.epoch,
                generation=target.generation,
                layout_hash=target.layout_hash,
                transport="grpc",
                sender="prefill-0",
                capability=target.capability,
            )
            await push.write(frame_to_bytes(opening))
            first = target.cached_tokens // decode.info.block_size
            frames, hashed = await push_block(push, first, decode.info.block_bytes)
            digest = commit_digest(hashed, first_token, num_tokens)
            await push.write(frame_to_bytes(KvCommit(frames, digest, first_token, num_tokens)))
            await push.done_writing()
            await push
        failed = await decode.event()
        assert isinstance(failed, Failed)
        assert failed.code is Code.DATA_LOSS
        await decode.send(RunLocal(spec("b")))
        assert len(await decode.answer()) == 4
        for info in await running.settled():
            assert info.load.integrity_ok, info.load.integrity_error


async def push_block(
    push: grpc.aio.StreamUnaryCall, first: int, block_bytes: int
) -> tuple[int, xxhash.xxh3_64]:
    """One block of zeros, well formed; returns the number of frames and what has hashed their
    digests.
    """

    payload = bytes(block_bytes)
    digest = xxhash.xxh3_64_intdigest(payload)
    blocks = KvBlocks(0, first, 1, 0, NUM_LAYERS, block_bytes, (digest,), (payload,))
    await push.write(frame_to_bytes(blocks))
    return 1, xxhash.xxh3_64(digest.to_bytes(8, "little"))


async def test_a_command_for_the_other_pool_fails_its_sequence_alone(
    tiny_model: Callable[..., Path],
) -> None:
    async with workers(tiny_model("llama"), CONFIG, "decode-0") as running:
        decode = await running.session("decode-0")
        await decode.send(Reserve(spec("a"), 10.0, "prefill-0"))
        reserved = await decode.event()
        assert isinstance(reserved, Reserved)
        await decode.send(Prefill(spec("b"), replace(reserved.target)))
        failed = await decode.event()
        assert isinstance(failed, Failed)
        assert (failed.request_id, failed.message) == (
            "b",
            "a decode worker does not accept Prefill",
        )
        await decode.send(Abort("a", 0))
        await running.settled()


async def test_a_draining_worker_refuses_and_becomes_empty(tiny_model: Callable[..., Path]) -> None:
    async with workers(tiny_model("llama"), CONFIG, "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        await decode.send(Reserve(spec("a"), 10.0, "prefill-0"))
        reserved = await decode.event()
        assert isinstance(reserved, Reserved)
        await decode.send(RunLocal(spec("b")))
        await decode.tokens()
        for session in (prefill, decode):
            async with grpc.aio.insecure_channel(session.info.address) as channel:
                await WorkerServiceStub(channel).Drain(pb.DrainRequest())
        assert len(await decode.answer()) == 3, "what it holds goes on"
        await decode.send(RunLocal(spec("c")))
        assert await decode.event() == Refused("c", 0, "draining")
        await prefill.send(Prefill(spec("a"), reserved.target))
        assert await prefill.event() == Refused("a", 0, "draining")
