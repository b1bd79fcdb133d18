"""Large chunks leave by groups of layers, before the step that computes them is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.worker_harness import workers

from kv_transfer.blocks.plan import Layers
from kv_transfer.push import Push
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.base.step_input import OnLayer
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.sampler import Sampled
from kvrelay.engine.sequence_segment import Segment
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker_messages import HandedOff, Prefill, Reserve, Reserved, RunLocal
from prefill_worker import prefill_stage as prefill_stage

CONFIG = ClusterConfig.model_validate(
    {
        "model": {"dtype": "float32"},
        "kv": {"block_size": 16, "memory": "4MiB"},
        "prefill": {"chunk_tokens": 80},
        "decode": {"chunk_tokens": 80},
    }
)
PROMPT = tuple(2 + i % 90 for i in range(170))  # two large chunks and a small one


def spec(request_id: str) -> SequenceSpec:
    params = SamplingParams(temperature=0.0, max_tokens=8, seed=5, ignore_eos=True)
    return SequenceSpec(request_id, 0, PROMPT, len(PROMPT), params)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("transport", ["memory", "shm", "grpc", "gloo"])
async def test_the_tokens_are_those_of_the_local_path(
    tiny_model: Callable[[str], Path], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int, Layers]] = []
    in_step: list[bool] = []
    computing, left = False, threading.Event()
    send, run = Push.send, ModelRunner.run

    def noted(push: Push, first: int, blocks: Sequence[int], layers: Layers | None = None) -> None:
        assert layers is not None
        sent.append((first, len(blocks), layers))
        in_step.append(computing)
        left.set()
        send(push, first, blocks, layers)

    def watched(
        runner: ModelRunner, segments: Sequence[Segment], on_layer: OnLayer | None = None
    ) -> list[list[Sampled]]:
        nonlocal computing
        computing = True
        try:
            sampled = run(runner, segments, on_layer)
            # On a busy machine a step ends before the event loop has sent anything.
            assert on_layer is None or left.wait(60)
            return sampled
        finally:
            computing = False

    monkeypatch.setattr(prefill_stage, "LARGE", 1)
    monkeypatch.setattr(Push, "send", noted)
    monkeypatch.setattr(ModelRunner, "run", watched)
    async with workers(tiny_model("llama"), CONFIG, "prefill-0", "decode-0", "decode-1") as running:
        prefill, decode, alone = [
            await running.session(name) for name in ("prefill-0", "decode-0", "decode-1")
        ]
        await decode.send(Reserve(spec("a"), 10.0, "prefill-0"))
        reserved = await decode.event()
        assert isinstance(reserved, Reserved)
        await prefill.send(Prefill(spec("a"), replace(reserved.target, transport=transport)))
        first = await prefill.tokens()
        handed_off = await prefill.event()
        assert isinstance(handed_off, HandedOff), handed_off
        assert handed_off.handoff.blocks == 11
        assert handed_off.handoff.bytes == 11 * handed_off.handoff.block_bytes
        tokens = [*first.token_ids, *await decode.answer()]
        layer = [Layers(0, 1), Layers(1, 1)]
        assert any(in_step), "some left while others were computed"
        assert sent == [
            *((0, 5, one) for one in layer),
            *((5, 5, one) for one in layer),
            (10, 1, Layers(0, 2)),  # the last chunk is so short that nobody is told of its layers
        ]
        await alone.send(RunLocal(spec("b")))
        assert await alone.answer() == tokens
        for info in await running.settled():
            assert info.load.integrity_ok, info.load.integrity_error
