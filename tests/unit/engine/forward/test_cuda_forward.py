"""The GPU's way through a model, on a CPU: what is fixed in a captured step, padding, whose memory
is written, and what is found out before it serves.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import flashinfer_stand_in
from support.graph_stand_ins import ROOM, Programs, Reruns, cuda_forward_runner
from support.ragged_sequences import RaggedSequences, random_prompts
from support.tiny_models import SERVED, VOCAB

from kvrelay.engine.attention.flashinfer_attention import DoesNotFit, FlashInfer
from kvrelay.engine.attention.packed_step import PackedStep
from kvrelay.engine.attention.paged_attention import Batch
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.step_input import Step
from kvrelay.engine.forward.capturable import values_unseen
from kvrelay.engine.forward.cuda_forward import CudaForward
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.errors import ConfigError

PROMPT = random.Random(0).choices(range(2, VOCAB), k=20)
TABLES = [[9, 3, 1], [2, 8, 30], [11, 12, 13], [7, 6, 5], [20, 4, 0]]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_stand_in.install(monkeypatch)


def torch_runner(folder: Path, **options: Any) -> ModelRunner:
    return ModelRunner.load(str(folder), kernels="torch", block_size=4, kv_bytes=1 << 20, **options)


# What flashinfer has no kernels for; the tests of this list are the others.
MISFITS = {
    "gpt_oss": "flashinfer does not support attention sinks",
    "deepseek_v3": "flashinfer supports head dimensions",
}


@pytest.mark.parametrize("architecture", SERVED)
@pytest.mark.sweep(4)
def test_tokens_are_those_of_plain_torch(
    architecture: str, tiny_model: Callable[[str], Path]
) -> None:
    """Sequences join while others decode, in chunks and in blocks from all over the pool, with NaN
    in what is free.
    """
    if architecture in MISFITS:
        with pytest.raises(DoesNotFit, match=MISFITS[architecture]):
            cuda_forward_runner(tiny_model(architecture), Programs())
        return
    prompts = random_prompts()
    plain = RaggedSequences(
        torch_runner(tiny_model(architecture)), prompts, chunk=64, contiguous=True
    )
    while not plain.done:
        plain.step()
    runner, forward = cuda_forward_runner(tiny_model(architecture), Programs())
    runner.kv.buffer.fill_(255)
    ours = RaggedSequences(runner, prompts, chunk=7, contiguous=False)
    while not ours.done:
        ours.step()
    assert ours.tokens == plain.tokens
    looks_for_padding = architecture == "gpt2"  # where the configuration has a token for it
    assert runner.not_captured == (
        "aten._local_scalar_dense.default depends on values" if looks_for_padding else ""
    )
    assert sorted(forward._captured) == ([] if looks_for_padding else [1, 2, 4, 8])


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_quantised_kv_is_refused(kv_dtype: str, tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(DoesNotFit, match=f"flashinfer supports KV in .* model has {kv_dtype}"):
        cuda_forward_runner(tiny_model("llama"), Programs(), kv_dtype=kv_dtype)


def decode(
    runner: ModelRunner, tokens: list[int], tables: list[list[int]], start: int = 0
) -> torch.Tensor:
    segments = [Segment([token], start, table) for token, table in zip(tokens, tables, strict=True)]
    return runner.forward(segments, range(len(tokens)))


def test_a_captured_step_serves_all_of_its_size_and_nothing_is_captured_while_serving(
    tiny_model: Callable[[str], Path],
) -> None:
    recorder = Reruns()
    runner, _ = cuda_forward_runner(tiny_model("llama"), recorder)
    plain = torch_runner(tiny_model("llama"))
    before = [graph.replays for graph in recorder.graphs]
    assert before == [1] * 4, "each was tried"
    for position in range(12):
        for count in (5, 3, 1):
            tokens = PROMPT[position : position + count]
            found = decode(runner, tokens, TABLES[:count], position)
            torch.testing.assert_close(
                found, decode(plain, tokens, TABLES[:count], position), rtol=1e-4, atol=1e-4
            )
    assert [graph.replays - 1 for graph in recorder.graphs] == [12, 12, 0, 12]


@pytest.mark.parametrize("architecture", sorted(SERVED.keys() - MISFITS.keys() - {"gpt2"}))
def test_the_host_waits_for_no_value_of_a_step(
    architecture: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, forward = cuda_forward_runner(tiny_model(architecture), Programs(), capture=0)
    run = forward._forward

    def unseen(inputs: PackedStep, batch: Batch) -> torch.Tensor:
        with values_unseen():
            return run(inputs, batch)

    monkeypatch.setattr(forward, "_forward", unseen)
    segments = [Segment(PROMPT[:9], 0, TABLES[0]), Segment([5], 3, TABLES[1])]
    for chosen in (segments, segments[1:], segments[:1]):
        assert runner.forward(chosen, [0]).isfinite().all()


def test_rows_are_those_asked_for(tiny_model: Callable[[str], Path]) -> None:
    runner, _ = cuda_forward_runner(tiny_model("llama"), Programs())
    every = decode(runner, [5, 6, 7], [[0], [1], [2]]).clone()
    segments = [Segment([token], 0, [i]) for i, token in enumerate((5, 6, 7))]
    for rows in ([2], [1, 0], [], [2, 2, 0]):
        assert torch.equal(runner.forward(segments, rows), every[rows])


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


def equals_plain_torch(runner: ModelRunner, folder: Path, count: int) -> None:
    tables = [[i] for i in range(count)]
    torch.testing.assert_close(
        decode(runner, PROMPT[:count], tables),
        decode(torch_runner(folder), PROMPT[:count], tables),
        rtol=1e-4,
        atol=1e-4,
    )


def test_steps_larger_than_any_captured_one(tiny_model: Callable[[str], Path]) -> None:
    runner, forward = cuda_forward_runner(tiny_model("llama"), Programs(), capture=4)
    assert sorted(forward._captured) == [1, 2, 4]
    equals_plain_torch(runner, tiny_model("llama"), 5)


def test_more_rows_than_sequences_are_not_replayed(tiny_model: Callable[[str], Path]) -> None:
    recorder = Reruns()
    runner, _ = cuda_forward_runner(tiny_model("llama"), recorder)
    logits = runner.forward([Segment([5], 0, [0])], [0, 0])
    torch.testing.assert_close(logits[0], logits[1])
    assert [graph.replays for graph in recorder.graphs] == [1] * 4


class Full(Programs):
    """Has no memory for steps of more than two sequences."""

    def record(self, forward: Callable[[], torch.Tensor]) -> Any:
        if len(forward()) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().record(forward)


def test_sizes_for_which_memory_is_missing_are_left_out(tiny_model: Callable[[str], Path]) -> None:
    runner, forward = cuda_forward_runner(tiny_model("llama"), Full())
    assert runner.not_captured == "steps of 4 sequences: CUDA out of memory"
    assert sorted(forward._captured) == [1, 2]
    for count in (1, 2, 3, 5):
        equals_plain_torch(runner, tiny_model("llama"), count)


class Altered:
    """flashinfer with one mistake, in all steps."""

    def __init__(self, kv: KvPool, mistake: Callable[..., torch.Tensor]) -> None:
        self._flashinfer = FlashInfer(kv, ROOM)
        self._mistake = mistake

    def ragged(self, inputs: PackedStep, step: Step) -> Batch:
        batch = self._flashinfer.ragged(inputs, step)
        attend, mistake = batch.attend, self._mistake

        class Wrong:
            def attend(self, layer: int, query: torch.Tensor, *kv: Any, **options: Any) -> Any:
                return mistake(attend, layer, query, *kv, **options)

        return Wrong()

    def decoding(self, inputs: PackedStep) -> Any:
        return self._flashinfer.decoding(inputs)


def _scaled(attend: Any, layer: int, query: torch.Tensor, *kv: Any, **options: Any) -> Any:
    return attend(layer, query, *kv, **{**options, "scale": options["scale"] * 1.5})


def _windowed(attend: Any, layer: int, query: torch.Tensor, *kv: Any, **options: Any) -> Any:
    """The first key of the longest sequence is left out."""
    return attend(layer, query, *kv, **{**options, "window": 10})


def _heads_swapped(attend: Any, layer: int, query: torch.Tensor, *kv: Any, **options: Any) -> Any:
    return attend(layer, query, *kv, **options).flip(2)


def _rows_swapped(attend: Any, layer: int, query: torch.Tensor, *kv: Any, **options: Any) -> Any:
    return attend(layer, query, *kv, **options).flip(1)


def _second_layer(attend: Any, layer: int, query: torch.Tensor, *kv: Any, **options: Any) -> Any:
    return attend(layer, query, *kv, **options) * (1 + layer * 1e-3)


def _not_a_number(attend: Any, layer: int, query: torch.Tensor, *kv: Any, **options: Any) -> Any:
    return attend(layer, query, *kv, **options) * float("nan")


def _no_compiler(*given: Any, **options: Any) -> Any:
    raise RuntimeError("no compiler")


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        (_scaled, "flashinfer does not give in layer 0 what torch's operators give"),
        (_windowed, "flashinfer does not give in layer 0 what torch's operators give"),
        (_heads_swapped, "flashinfer does not give in layer 0 what torch's operators give"),
        (_rows_swapped, "flashinfer does not give in layer 0 what torch's operators give"),
        (_second_layer, "flashinfer does not give in layer 1 what torch's operators give"),
        (_not_a_number, "flashinfer does not give in layer 0 what torch's operators give"),
        (_no_compiler, r"flashinfer fails on this device: RuntimeError\('no compiler'\)"),
    ],
)
def test_wrong_attention_is_refused(
    mistake: Any, reason: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(DoesNotFit, match=reason):
        cuda_forward_runner(tiny_model("llama"), Programs(), lambda kv: Altered(kv, mistake))


class Stuck(Programs):
    """What it captures does not read its inputs."""

    def record(self, forward: Callable[[], torch.Tensor]) -> Any:
        output = forward().clone()
        return super().record(lambda: output.clone())


def test_a_captured_step_that_is_wrong_is_not_used(tiny_model: Callable[[str], Path]) -> None:
    runner, forward = cuda_forward_runner(tiny_model("llama"), Stuck())
    assert runner.not_captured == "a captured step does not give what the model gives"
    assert not forward._captured
    equals_plain_torch(runner, tiny_model("llama"), 3)


@pytest.mark.parametrize("max_model_len", [1, 2, 5])
def test_a_pool_of_a_few_tokens(max_model_len: int, tiny_model: Callable[[str], Path]) -> None:
    runner = torch_runner(tiny_model("llama"), max_model_len=max_model_len)
    small = KvPool(runner.layout, 1 + runner.layout.blocks_for(max_model_len))
    model = runner._forward._model  # type: ignore[union-attr]
    forward = CudaForward(model, small, max_model_len, FlashInfer(small, ROOM), Programs())
    forward.capture_decode_steps(8)
    assert (forward.not_captured, len(forward._captured)) == ("", 4)


def test_the_largest_step_is_tried_before_the_worker_serves(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, forward = cuda_forward_runner(tiny_model("llama"), Programs())
    ran: list[Step] = []

    def run(step: Step) -> torch.Tensor:
        ran.append(step)
        return CudaForward._run(forward, step)

    monkeypatch.setattr(forward, "_run", run)
    runner.try_largest_step(32, 5)
    assert [(len(step.token_ids), len(step.rows)) for step in ran] == [(36, 5)]

    def full(step: Step) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(forward, "_run", full)
    with pytest.raises(
        ConfigError, match=r"kv.memory: \d+ bytes leave too little memory .*; lower kv.memory: CUDA"
    ):
        runner.try_largest_step(32, 5)


@pytest.mark.parametrize("device", ["cuda", "cuda:63"])
def test_without_a_gpu_one_is_told(device: str, tiny_model: Callable[[str], Path]) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(
        ConfigError,
        match=f"{device} is not available: torch .* finds . CUDA devices; .*num_gpus: 0",
    ):
        ModelRunner.load(str(tiny_model("llama")), kv_bytes=1 << 20, device=device)
