"""Workers of models with sliding windows: the KV behind the windows is given up, and answers stay
the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.speculation import Answers, by_hand_off, check_moves, local, settled
from support.tiny_models import build
from support.worker_harness import workers

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.engine.kvcache.window_parts import BlockUnits
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.runtime.model_loading import load_runner
from kvrelay.worker.runtime.settings import WorkerSettings
from kvrelay.worker.sequence import Sequence
from kvrelay.worker_messages import Failed, Prefill, Reserve, Reserved

LENGTH = 1024
# Every second layer, all layers, and every second with attention sinks.
MODELS = ("gemma3_text", "mistral", "gpt_oss")


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def folder(architecture: str) -> Path:
        path = tmp_path_factory.mktemp(architecture)
        # A block takes a page in each region.
        return build(architecture, path, max_position_embeddings=LENGTH, head_dim=16)

    return folder


def config(memory: str = "16MiB", transport: str = "auto", **decode: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": {"dtype": "float32"},
            "kv": {"block_size": 32, "memory": memory},
            "prefill": {"chunk_tokens": 96},
            "decode": {"max_batch": 12, "chunk_tokens": 64, **decode},
            "transfer": {"transport": transport},
        }
    )


def specs(count: int, seed: int = 0) -> list[SequenceSpec]:
    """Prompts of any length, some of which begin alike."""
    draw = random.Random(seed)
    stems = [[draw.randrange(2, 120) for _ in range(600)] for _ in range(3)]
    made = []
    for number in range(count):
        prompt = draw.choice(stems)[: draw.choice([3, 100, 250, 400, 600])]
        prompt = (*prompt, *(draw.randrange(2, 120) for _ in range(draw.randint(1, 40))))
        sampling = SamplingParams(
            temperature=draw.choice([0.0, 0.7]),
            seed=number,
            max_tokens=draw.choice([1, 40, 300]),
            ignore_eos=True,
        )
        made.append(SequenceSpec(f"r{number}", 0, prompt, len(prompt), sampling))
    return made


async def kept_whole(
    monkeypatch: pytest.MonkeyPatch, model: Path, requests: list[SequenceSpec]
) -> Answers:
    """The answers of a worker that keeps the KV of all tokens."""
    with monkeypatch.context() as patch:
        patch.setattr(ClusterConfig, "whole_windows", "to compare")
        answered, _, _ = await local(model, config(), requests)
    return answered


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.sweep(3)
async def test_answers_are_those_of_all_kv(
    long_model: Callable[[str], Path], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With much memory, with so little that sequences are preempted, and with drafts."""
    model, requests = long_model(architecture), specs(24)
    expected = await kept_whole(monkeypatch, model, requests)
    drafts = {"speculation": {"kind": "ngram", "tokens": 4}}
    for settings in (config(), config("400KiB"), config(**drafts)):
        found, _, _ = await local(model, settings, requests)
        assert found == expected


@pytest.mark.long
@pytest.mark.parametrize("transport", ["auto", "grpc", "gloo"])
@pytest.mark.sweep(3)
async def test_sequences_are_handed_over_and_move(
    long_model: Callable[[str], Path], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, requests = long_model("gemma3_text"), specs(10, seed=1)
    expected = await kept_whole(monkeypatch, model, requests)
    moved = config(transport=transport)
    async with workers(model, moved, "prefill-0", "decode-0") as running:
        prefill = await running.session("prefill-0")
        decode = await running.session("decode-0")
        for one in requests:
            tokens, finish = await by_hand_off(prefill, decode, one, until=LENGTH)
            assert (tuple(tokens), finish) == expected[one.request_id]
        await settled(running)
    if transport == "auto":
        await check_moves(model, moved, specs(6, seed=2), seed=3, plain=moved)


def test_the_memory_behind_the_windows_comes_back(tmp_path: Path) -> None:
    """A prompt of 8 windows in a model whose layers are as gemma3's: 5 of 6 have the window."""
    model = build(
        "gemma3_text",
        tmp_path,
        num_hidden_layers=6,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        sliding_window=512,
        max_position_embeddings=4352,
        num_key_value_heads=1,
        head_dim=64,
    )
    stored = {}
    for step_tokens in (None, 256):
        runner = ModelRunner.load(
            str(model), block_size=16, kv_bytes=2**25, max_model_len=4352, step_tokens=step_tokens
        )
        cache = KvCache(
            runner.num_blocks,
            16,
            windows=runner.windows,
            capacity=BlockUnits.in_memory(runner.layout, runner.kv_bytes),
            memory=runner.kv.vacated,
            # A cache keeps what is behind the windows while there is room.
            prefix_cache=False,
        )
        # The engine's trial at load wrote to some blocks.
        before = runner.kv.stored_bytes
        tokens = [2 + number % 100 for number in range(4096)]
        spec = SequenceSpec("r", 0, tuple(tokens), len(tokens), SamplingParams(seed=0))
        sequence = Sequence(spec, 0.0, cache.hasher(""))
        sequence.take_blocks(cache, len(tokens))
        while sequence.uncomputed:
            start, end = sequence.num_computed, min(4096, sequence.num_computed + 256)
            segment = Segment(sequence.tokens[start:end], start, sequence.blocks)
            runner.run([segment])
            sequence.advance(cache, end - start)
        runner.kv.vacated.settle()
        stored[step_tokens] = runner.kv.stored_bytes - before
        held = cache.pool.units_held / BlockUnits.of(runner.layout).all * runner.layout.block_bytes
        assert stored[step_tokens] <= held
        sequence.drop_blocks(cache)
        if step_tokens:
            runner.kv.vacated.settle()
            assert runner.kv.stored_bytes <= before
        runner.close()
    assert stored[None] > 0.9 * 4096 * 6 * 2 * 64 * 4
    assert stored[256] <= 0.35 * stored[None]


async def test_free_blocks_of_a_loaded_worker_take_no_memory(
    long_model: Callable[[str], Path],
) -> None:
    model = str(long_model("gemma3_text"))
    runner = await load_runner(WorkerSettings("decode-0", "decode", model, "", config()))
    assert runner.windows is not None
    assert runner.kv.stored_bytes == 0
    runner.close()


async def test_why_all_kv_is_kept_is_logged(
    long_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A block of fewer tokens takes less than a page in a layer, so nothing would come back."""
    small = config().model_copy(update={"kv": config().kv.model_copy(update={"block_size": 16})})
    model = str(long_model("gemma3_text"))
    runner = await load_runner(WorkerSettings("decode-0", "decode", model, "", small))
    assert runner.windows is None
    logged = capsys.readouterr()
    assert "no whole pages of memory" in logged.out + logged.err
    runner.close()


async def test_blocks_go_only_to_workers_that_keep_as_much(
    long_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hand-off between a worker that gives up KV and one that does not is refused with the
    reason.
    """
    model = long_model("gemma3_text")
    (one,) = specs(1)
    # An answer of one token ends with the prefill worker, which then reports no failed push.
    one = replace(one, sampling=replace(one.sampling, max_tokens=40))
    async with workers(model, config(), "decode-0") as running:
        decode = await running.session("decode-0")
        monkeypatch.setattr(ClusterConfig, "whole_windows", "another version")
        async with workers(model, config(), "prefill-0") as others:
            prefill = await others.session("prefill-0")
            await decode.send(Reserve(one, 10.0, "prefill-0"))
            reserved = await decode.event()
            assert isinstance(reserved, Reserved)
            await prefill.send(Prefill(one, reserved.target))
            event = await prefill.event()
            while not isinstance(event, Failed):
                event = await prefill.event()
            assert "both workers need the same version" in event.message
