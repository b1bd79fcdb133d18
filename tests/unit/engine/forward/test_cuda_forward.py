"""The GPU's way through a model, on a CPU: what is fixed in a recorded step, padding, and whose
memory is written.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.graph_stand_ins import Programs, Reruns, cuda_forward_runner
from support.ragged_sequences import RaggedSequences, random_prompts
from support.tiny_models import SERVED, VOCAB

from kvrelay.engine.attention.flashinfer_attention import DoesNotFit
from kvrelay.engine.attention.packed_step import PackedShape, PackedStep
from kvrelay.engine.attention.ragged_batch import RaggedBatch
from kvrelay.engine.attention.sdpa import Sdpa
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.step_input import Part, Step
from kvrelay.engine.forward import cuda_forward
from kvrelay.engine.forward.cuda_forward import CudaForward
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.errors import ConfigError

PROMPT = random.Random(0).choices(range(2, VOCAB), k=20)


def torch_runner(folder: Path, **options: Any) -> ModelRunner:
    return ModelRunner.load(str(folder), kernels="torch", block_size=4, kv_bytes=1 << 20, **options)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
@pytest.mark.parametrize("architecture", SERVED)
def test_tokens_are_those_of_plain_torch(
    architecture: str, kv_dtype: str, tiny_model: Callable[[str], Path]
) -> None:
    """Sequences join while others decode, in chunks and in blocks from all over the pool, with NaN
    in what is free.
    """
    prompts = random_prompts()
    plain = RaggedSequences(
        torch_runner(tiny_model(architecture), kv_dtype=kv_dtype),
        prompts,
        chunk=64,
        contiguous=True,
    )
    while not plain.done:
        plain.step()
    runner, forward = cuda_forward_runner(tiny_model(architecture), Programs(), kv_dtype=kv_dtype)
    runner.kv.buffer.fill_(255)
    ours = RaggedSequences(runner, prompts, chunk=7, contiguous=False)
    while not ours.done:
        ours.step()
    assert ours.tokens == plain.tokens
    looks_for_padding = architecture == "gpt2"  # where the configuration has a token for it
    assert forward.not_captured == (
        "aten._local_scalar_dense.default depends on values" if looks_for_padding else ""
    )
    assert bool(forward._recorded) != looks_for_padding


def decode(
    runner: ModelRunner, tokens: list[int], tables: list[list[int]], start: int = 0
) -> torch.Tensor:
    segments = [Segment([token], start, table) for token, table in zip(tokens, tables, strict=True)]
    return runner.forward(segments, range(len(tokens)))


def test_a_recorded_step_serves_all_of_its_size(tiny_model: Callable[[str], Path]) -> None:
    recorder = Reruns()
    runner, forward = cuda_forward_runner(tiny_model("llama"), recorder)
    plain = torch_runner(tiny_model("llama"))
    tables = [[9, 3, 1], [2, 8, 30], [11, 12, 13], [7, 6, 5], [20, 4, 0]]
    recorder.graphs.clear()
    forward._recorded.clear()
    for position in range(12):
        for count in (5, 3, 1):
            tokens = PROMPT[position : position + count]
            found = decode(runner, tokens, tables[:count], position)
            torch.testing.assert_close(
                found, decode(plain, tokens, tables[:count], position), rtol=1e-4, atol=1e-4
            )
    shapes = {(shape.parts, shape.width) for shape in forward._recorded}
    assert shapes == {(parts, width) for parts in (8, 4, 1) for width in (1, 2, 3)}
    assert [graph.replays for graph in recorder.graphs] == [4] * 9


def test_rows_are_those_asked_for(tiny_model: Callable[[str], Path]) -> None:
    runner, forward = cuda_forward_runner(tiny_model("llama"), Programs())
    every = decode(runner, [5, 6, 7], [[0], [1], [2]]).clone()
    segments = [Segment([token], 0, [i]) for i, token in enumerate((5, 6, 7))]
    for rows in ([2], [1, 0], [], [2, 2, 0]):
        assert torch.equal(runner.forward(segments, rows), every[rows])
    assert {shape.rows for shape in forward._recorded} == {4}


@pytest.mark.parametrize("recorder", [Reruns, Programs])
def test_only_own_blocks_and_the_scratch_block_are_written(
    recorder: type[Reruns | Programs], tiny_model: Callable[[str], Path]
) -> None:
    runner, _ = cuda_forward_runner(tiny_model("llama"), recorder())
    layers = runner.kv.layers
    for count in (1, 3, 5):
        runner.kv.buffer.fill_(7)
        own = random.Random(count).sample(range(runner.num_blocks), count)
        decode(runner, PROMPT[:count], [[block] for block in own])
        padded = count > 1
        for layer in layers:
            for region in (layer.k, layer.v):
                untouched = torch.full_like(region[0], 7, dtype=torch.uint8).view(torch.uint8)
                filled = region.view(torch.uint8).flatten(1).ne(untouched.flatten()[0]).any(1)
                written = set(own) | ({runner.num_blocks} if padded else set())
                assert set(filled.nonzero().flatten().tolist()) == written


def test_nan_of_one_sequence_stays_with_it(tiny_model: Callable[[str], Path]) -> None:
    runner, _ = cuda_forward_runner(tiny_model("llama"), Programs())
    for start, token in enumerate(PROMPT[:6]):
        alone = decode(runner, [token], [[4, 5]], start).clone()
    for layer in runner.kv.layers:
        layer.v[[8, 9]] = float("nan")
        layer.k[[runner.num_blocks]] = float("nan")
    together = decode(runner, [3, PROMPT[5], 3], [[8, 9], [4, 5], [10, 11]], 5)
    torch.testing.assert_close(together[1], alone[0], rtol=1e-4, atol=1e-4)
    assert together[0].isnan().all()
    assert not together[2].isnan().any()


def test_steps_larger_than_any_recorded_one(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_forward, "MAX_RECORDED", 4)
    runner, forward = cuda_forward_runner(tiny_model("llama"), Programs())
    before = dict(forward._recorded)
    logits = decode(runner, PROMPT[:5], [[i] for i in range(5)])
    plain = decode(torch_runner(tiny_model("llama")), PROMPT[:5], [[i] for i in range(5)])
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-4)
    assert forward._recorded == before


def test_in_a_mixed_step_decoding_sequences_attend_together(
    tiny_model: Callable[[str], Path],
) -> None:
    runner = torch_runner(tiny_model("llama"))
    step = Step([1] * 7, [Part(0, 1, 8, [0, 1, 2]), Part(1, 1, 3, [3]), Part(2, 5, 0, [4, 5])], [])
    attention = Sdpa(runner.kv)
    assert attention.width(step) == 3
    inputs = PackedStep.on_host(step, PackedShape(7, 0, 3, 3), 4, pinned=False)
    batch = attention.ragged(inputs, step)
    assert [(part.row, part.new) for part in batch.parts] == [(0, 2), (2, 5)]


def test_more_rows_than_sequences_are_not_recorded(tiny_model: Callable[[str], Path]) -> None:
    runner, forward = cuda_forward_runner(tiny_model("llama"), Programs())
    before = dict(forward._recorded)
    segment = Segment([5], 0, [0])
    logits = runner.forward([segment], [0, 0])
    torch.testing.assert_close(logits[0], logits[1])
    assert forward._recorded == before


class _Full:
    """Has no memory for what it would record."""

    def record(self, forward: Callable[[], torch.Tensor]) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_where_no_memory_is_left_to_record_steps_run_as_they_are(
    tiny_model: Callable[[str], Path],
) -> None:
    runner, forward = cuda_forward_runner(tiny_model("llama"), _Full())
    assert forward.not_captured == "CUDA out of memory"
    expected = decode(torch_runner(tiny_model("llama")), PROMPT[:3], [[0], [1], [2]])
    torch.testing.assert_close(
        decode(runner, PROMPT[:3], [[0], [1], [2]]), expected, rtol=1e-4, atol=1e-4
    )


def test_the_oldest_shape_is_forgotten(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_forward, "MAX_GRAPHS", 2)
    runner, forward = cuda_forward_runner(tiny_model("llama"), Reruns())
    plain = torch_runner(tiny_model("llama"))
    for count in (1, 2, 4, 1):
        tables = [[i] for i in range(count)]
        found, wanted = (decode(one, PROMPT[:count], tables) for one in (runner, plain))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert [shape.parts for shape in forward._recorded] == [4, 1]


class _Wrong(Sdpa):
    """Reads the block tables backwards."""

    def ragged(self, inputs: PackedStep, step: Step) -> RaggedBatch:
        inputs.tables[:, :2] = inputs.tables[:, :2].flip(1)
        return super().ragged(inputs, step)


class _Broken(Sdpa):
    def ragged(self, inputs: PackedStep, step: Step) -> RaggedBatch:
        raise RuntimeError("no compiler")


def _misfit(kv: KvPool) -> Sdpa:
    raise DoesNotFit("flashinfer is not installed")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (_misfit, "flashinfer is not installed"),
        (_Wrong, "flashinfer does not give what torch gives"),
        (_Broken, "flashinfer fails on this device: RuntimeError('no compiler')"),
        (Sdpa, ""),
    ],
)
def test_flashinfer_serves_where_it_was_tried_with_success(
    kind: Callable[[KvPool], Sdpa], reason: str, tiny_model: Callable[[str], Path]
) -> None:
    _, forward = cuda_forward_runner(
        tiny_model("llama"), Programs(), lambda runner: kind(runner.kv)
    )
    assert forward.without_flashinfer == reason
    assert (type(forward._attention) is kind) is (reason == "")


class _Stuck(Programs):
    """What it records does not read its inputs."""

    def record(self, forward: Callable[[], torch.Tensor]) -> Any:
        output = forward().clone()
        return super().record(lambda: output.clone())


def test_a_recorded_step_that_is_wrong_is_not_used(tiny_model: Callable[[str], Path]) -> None:
    runner, forward = cuda_forward_runner(tiny_model("llama"), _Stuck())
    assert forward.not_captured == "a recorded step does not give what the model gives"
    expected = decode(torch_runner(tiny_model("llama")), PROMPT[:3], [[0], [1], [2]])
    torch.testing.assert_close(
        decode(runner, PROMPT[:3], [[0], [1], [2]]), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("max_model_len", [1, 2, 5])
def test_a_pool_of_a_few_tokens(max_model_len: int, tiny_model: Callable[[str], Path]) -> None:
    runner = torch_runner(tiny_model("llama"), max_model_len=max_model_len)
    small = KvPool(runner.layout, 1 + runner.layout.blocks_for(max_model_len))
    model = runner._forward._model  # type: ignore[union-attr]
    assert CudaForward(model, small, max_model_len, Programs(), None).not_captured == ""


@pytest.mark.parametrize("device", ["cuda", "cuda:63"])
def test_without_a_gpu_one_is_told(device: str, tiny_model: Callable[[str], Path]) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(
        ConfigError,
        match=f"{device} is not available: torch .* finds . CUDA devices; .*num_gpus: 0",
    ):
        ModelRunner.load(str(tiny_model("llama")), kv_bytes=1 << 20, device=device)
