"""A model by the kernels: the same to the bit however tokens are packed, and captured graphs as
good as plain ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.tiny_models import SERVED, VOCAB, build

from kvrelay.engine.base.step_input import Step
from kvrelay.engine.forward import native_forward
from kvrelay.engine.forward.native_forward import NativeForward
from kvrelay.engine.native.build import library
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.errors import ConfigError

library()  # that a compiler is here is what the tests below stand on
Weights = Literal["auto", "int8"]
PROMPT = random.Random(0).choices(range(2, VOCAB), k=45)
RUN = range(20, 24)  # blocks


@pytest.fixture(autouse=True)
def captured_at_the_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps of a shape show all that can happen to it."""
    monkeypatch.setattr(native_forward, "CAPTURED_AFTER", 1)


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose rows do not fill vectors."""
    return build(
        "llama", tmp_path_factory.mktemp("odd"), intermediate_size=50, head_dim=10, hidden_size=44
    )


@pytest.fixture(scope="module")
def odd_for_int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Such a llama, with heads that int4 holds."""
    return build(
        "llama", tmp_path_factory.mktemp("int4"), intermediate_size=50, head_dim=12, hidden_size=44
    )


def load(folder: Path, *, weights: Weights = "auto", **options: str) -> ModelRunner:
    runner = ModelRunner.load(
        str(folder), block_size=16, kv_bytes=1 << 20, weights=weights, **options
    )  # type: ignore[arg-type]
    assert runner.kernels == "native"
    return runner


def forward_of(runner: ModelRunner) -> NativeForward:
    assert isinstance(runner._forward, NativeForward)
    return runner._forward


def segment(tokens: Sequence[int], start: int = 0, blocks: Sequence[int] = RUN) -> Segment:
    return Segment(tokens, start, blocks)


def chunked(
    runner: ModelRunner, tokens: Sequence[int], chunk: int, blocks: Sequence[int] = RUN
) -> torch.Tensor:
    """Logits after the last token of each chunk, [chunks, vocab_size]."""
    logits = []
    for start in range(0, len(tokens), chunk):
        new = tokens[start : start + chunk]
        logits.append(runner.forward([segment(new, start, blocks)], [len(new) - 1]).clone())
    return torch.cat(logits)


@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_depend_on_the_sequence_alone(
    odd_model: Path, odd_for_int4: Path, dtype: str, kv_dtype: str, weights: Weights
) -> None:
    """To the bit: not on chunks, nor on the batch, nor on whether the step is recorded."""
    folder = odd_for_int4 if kv_dtype == "int4" else odd_model
    runner = load(folder, dtype=dtype, kv_dtype=kv_dtype, weights=weights)
    one_by_one = chunked(runner, PROMPT, 1)
    every = runner.forward([segment(PROMPT)], range(len(PROMPT)))
    assert torch.equal(every, one_by_one)
    for chunk in (7, 16, len(PROMPT)):
        for _ in range(3):  # plain, recording, recorded
            assert torch.equal(chunked(runner, PROMPT, chunk)[-1], one_by_one[-1])
    lengths = [1, 1, 1, 5, 12, 1, 1, 30, 1, 1, 2, 1]
    others = [segment(PROMPT[i : i + n], 0, [2 * i, 2 * i + 1]) for i, n in enumerate(lengths)]
    runner.forward([segment(PROMPT[:-1], 0, range(30, 33))], [0])
    last = segment(PROMPT[-1:], len(PROMPT) - 1, range(30, 33))
    for _ in range(3):
        together = runner.forward([*others, last], [sum(lengths), 0])
        assert torch.equal(together[0], one_by_one[-1])
        assert torch.equal(together[1], one_by_one[0])


@pytest.mark.sweep(4)
@pytest.mark.parametrize("architecture", SERVED)
def test_a_recorded_step_is_the_plain_one(
    architecture: str, tiny_model: Callable[[str], Path]
) -> None:
    """Whatever was in memory before, and wherever the blocks are; or the model says why it is not
    recorded.
    """
    runner = load(tiny_model(architecture), dtype="bfloat16")
    forward = forward_of(runner)
    plain = load(tiny_model(architecture), dtype="bfloat16")
    forward_of(plain).not_captured = "for comparison"
    generator = random.Random(1)
    for rows in ([8], [2, 5, 8], []):
        for _ in range(4):
            blocks = generator.sample(range(runner.num_blocks), 5)
            lengths = generator.choice([[1, 1, 7], [3, 3, 3], [9], [8, 1]])
            segments = [
                segment(generator.choices(range(VOCAB), k=n), 0, [blocks[i]])
                for i, n in enumerate(lengths)
            ]
            assert torch.equal(runner.forward(segments, rows), plain.forward(segments, rows))
            for block in blocks[: len(lengths)]:
                for mine, its in zip(runner.kv.layers, plain.kv.layers, strict=True):
                    assert torch.equal(mine.k[block], its.k[block])
    looks_for_padding = architecture == "gpt2"  # where the configuration has a token for it
    assert bool(forward.not_captured) == looks_for_padding
    assert bool(forward._captured) != looks_for_padding


def test_later_tokens_of_a_recorded_step(tiny_model: Callable[[str], Path]) -> None:
    """Positions and block tables change from run to run."""
    runner = load(tiny_model("llama"))
    once = runner.forward([segment(PROMPT)], range(len(PROMPT))).clone()
    shuffled = [11, 3, 7]
    for position, token in enumerate(PROMPT):
        logits = runner.forward([segment([token], position, shuffled)], [0])
        assert torch.equal(logits[0], once[position])
    assert list(forward_of(runner)._captured) == [(1, 1, False)]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss"])
def test_memory_grows_neither_with_runs_nor_with_shapes(
    architecture: str, tiny_model: Callable[[str], Path]
) -> None:
    runner = load(tiny_model(architecture), dtype="bfloat16")
    forward = forward_of(runner)
    sizes = []
    for length in (45, 45, *range(44, 24, -1), *range(25, 46)):
        for _ in range(3):
            runner.forward([segment(PROMPT[:length])], [length - 1])
        sizes.append(forward._pool.nbytes)
    assert len(forward._captured) == 21
    assert 0 < sizes[0] == sizes[1]
    assert sizes[-1] <= 1.5 * sizes[0]


def test_a_shape_takes_the_place_of_one_that_is_used_less(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_forward, "MAX_CAPTURED", 3)
    runner = load(tiny_model("llama"))
    captured = forward_of(runner)._captured
    wanted = {
        length: runner.forward([segment(PROMPT[:length])], [0]).clone() for length in range(1, 6)
    }
    assert not captured
    for length, logits in wanted.items():
        for _ in range(3**length):
            assert torch.equal(runner.forward([segment(PROMPT[:length])], [0]), logits)
        assert len(captured) <= 3
    assert (5, 1, False) in captured


def test_shapes_that_come_in_turn_are_not_captured_again_and_again(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_forward, "MAX_CAPTURED", 4)
    monkeypatch.setattr(native_forward, "HALVED_AFTER", 50)
    runner = load(tiny_model("llama"))
    forward, captures = forward_of(runner), list[int]()
    capture = forward._capture

    def counted(step: Step) -> torch.Tensor:
        captures.append(len(step.token_ids))
        return capture(step)

    monkeypatch.setattr(forward, "_capture", counted)
    for _ in range(40):
        for length in range(1, 13):
            runner.forward([segment(PROMPT[:length])], [0])
    assert len(captures) <= 3 * 4
    assert len(forward._met) <= 12


def test_a_shape_is_captured_when_it_has_come_often(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_forward, "CAPTURED_AFTER", 4)
    runner = load(tiny_model("llama"))
    captured = forward_of(runner)._captured
    for _ in range(4):
        for length in (7, 9):
            runner.forward([segment(PROMPT[:length])], [0])
    assert not captured
    runner.forward([segment(PROMPT[:7])], [0])
    assert list(captured) == [(7, 1, False)]


def test_decode_steps_are_captured_before_there_are_any(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(tiny_model("llama"))
    captured = forward_of(runner)._captured
    wanted = runner.forward([segment(PROMPT[:1]), segment(PROMPT[1:2], 0, [3])], [0, 1]).clone()
    runner.capture_decode_steps(3, 0.0)
    assert not captured, "there was no time"
    runner.capture_decode_steps(3, 60.0)
    assert list(captured) == [(1, 1, False), (2, 2, False), (3, 3, False)]
    monkeypatch.setattr(forward_of(runner), "_forward", None)
    found = runner.forward([segment(PROMPT[:1]), segment(PROMPT[1:2], 0, [3])], [0, 1])
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("lasting", [False, True], ids=["for some shapes", "always"])
def test_a_model_that_looks_at_values_is_served_as_it_is(
    lasting: bool, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = load(tiny_model("llama")).forward([segment(PROMPT[:5])], [4])
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    plain = LlamaDecoderLayer.forward

    def looking(self: LlamaDecoderLayer, x: torch.Tensor, **others: Any) -> torch.Tensor:
        if (lasting or x.shape[1] == 5) and bool((x > 1e9).any()):
            x = x * 2
        return plain(self, x, **others)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", looking)
    runner = load(tiny_model("llama"))
    assert bool(forward_of(runner).not_captured) == lasting
    for _ in range(3):
        assert torch.equal(runner.forward([segment(PROMPT[:5])], [4]), wanted)
    assert "depends on values" in forward_of(runner).not_captured


def test_an_arena_of_one_block(tiny_model: Callable[[str], Path]) -> None:
    folder = str(tiny_model("llama"))
    size = load(tiny_model("llama")).layout.block_bytes
    runner = ModelRunner.load(folder, block_size=16, kv_bytes=size, max_model_len=16)
    assert (runner.kernels, runner.num_blocks) == ("native", 1)
    assert runner.forward([segment(PROMPT[:16], 0, [0])], [15]).isfinite().all()


def test_the_last_block_of_the_arena(tiny_model: Callable[[str], Path]) -> None:
    runner = load(tiny_model("llama"))
    wanted = chunked(runner, PROMPT[:33], 33)
    end = range(runner.num_blocks - 3, runner.num_blocks)
    assert torch.equal(chunked(runner, PROMPT[:33], 8, end)[-1], wanted[-1])


def test_int8_weights_are_near_the_models_own(tiny_model: Callable[[str], Path]) -> None:
    own, int8 = (load(tiny_model("llama"), weights=weights) for weights in ("auto", "int8"))
    logits = [runner.forward([segment(PROMPT)], range(len(PROMPT))) for runner in (own, int8)]
    assert int8.weight_bytes < own.weight_bytes
    assert int8.layout_hash == own.layout_hash, "KV goes from one to the other"
    assert not torch.equal(*logits)
    assert torch.nn.functional.cosine_similarity(*logits).min() > 0.95


def test_int8_weights_of_inputs_that_are_not_whole_words(tmp_path: Path) -> None:
    folder = build("llama", tmp_path, intermediate_size=50)  # down_proj keeps its own
    logits = [
        load(folder, weights=weights).forward([segment(PROMPT)], range(len(PROMPT)))
        for weights in ("auto", "int8")
    ]
    assert torch.nn.functional.cosine_similarity(*logits).min() > 0.95


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kernels": "torch"}, "the torch kernels were requested"),
        ({"block_size": 8}, "they do not fit float32 weights and float32 KV in blocks of 8 tokens"),
        ({"dtype": "float16"}, "they do not fit float16 weights and float16 KV"),
    ],
)
def test_without_kernels(
    tiny_model: Callable[[str], Path], options: dict[str, str], reason: str
) -> None:
    folder = str(tiny_model("llama"))
    runner = ModelRunner.load(folder, **{"block_size": 16, "kv_bytes": 1 << 20, **options})  # type: ignore[arg-type]
    assert runner.kernels == "torch"
    assert reason in runner.without_kernels
    assert runner.layout.word is None
    with pytest.raises(ConfigError, match=f"weights: int8 needs the native kernels: {reason}"):
        ModelRunner.load(
            folder, **{"block_size": 16, "kv_bytes": 1 << 20, "weights": "int8", **options}
        )  # type: ignore[arg-type]


def test_the_kernels_order_has_another_hash(tiny_model: Callable[[str], Path]) -> None:
    folder = str(tiny_model("llama"))
    native, torchs = (
        ModelRunner.load(folder, block_size=16, kv_bytes=1 << 20, kernels=kernels)
        for kernels in ("auto", "torch")
    )
    assert native.layout_hash != torchs.layout_hash
    assert native.layout.block_bytes == torchs.layout.block_bytes


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_int4_refuses_heads_that_it_cannot_hold(odd_model: Path, kernels: str) -> None:
    with pytest.raises(ConfigError, match=r"int4 holds heads .* multiples of 4.*set int8 or auto"):
        load(odd_model, kv_dtype="int4", kernels=kernels)


def test_a_step_that_raises_while_it_is_captured_says_nothing_of_the_model(
    odd_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(odd_model)
    forward = forward_of(runner)
    expected = runner.forward([segment(PROMPT[:3])], [2]).clone()
    with monkeypatch.context() as broken:

        def unwell(_: object, inputs: object) -> torch.Tensor:
            raise RuntimeError("the device is unwell")

        broken.setattr(NativeForward, "_forward", unwell)
        with pytest.raises(RuntimeError, match="unwell"):
            runner.forward([segment(PROMPT[:3])], [2])
    assert forward.not_captured == ""
    for _ in range(2):
        assert torch.equal(runner.forward([segment(PROMPT[:3])], [2]), expected)
    assert len(forward._captured) == 1


@pytest.mark.parametrize("vocab_size", [2, 3, 4])
def test_a_vocabulary_of_a_few_tokens(tmp_path: Path, vocab_size: int) -> None:
    small = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 1}
    runner = load(build("llama", tmp_path, vocab_size=vocab_size, **small))
    prompt = [number % vocab_size for number in range(9)]
    assert runner.forward([segment(prompt)], [8]).shape == (1, vocab_size)
    assert not forward_of(runner).not_captured
