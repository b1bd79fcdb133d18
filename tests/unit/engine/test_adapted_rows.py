"""Adapters in the engine: logits of the merged model for each row of a mixed batch, with both kinds
of kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
import torch
from support.adapters import merged, save_adapter, targets_of
from support.tiny_models import build

import kvrelay
from kvrelay.engine.model.loader import load_model
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.errors import InvalidArgument, ModelRefused
from kvrelay.models import resolve_model
from kvrelay.models.adapters.adapter_files import read_adapter

Kernels = Literal["auto", "torch"]
KERNELS: list[Kernels] = ["torch", "auto"]


@contextmanager
def runner_of(
    base: Path, kernels: Kernels, weights: Literal["auto", "int8"] = "auto", slots: int = 4
) -> Iterator[ModelRunner]:
    runner = ModelRunner.load(
        str(base), kv_bytes=2**24, block_size=16, kernels=kernels, weights=weights,
        adapter_slots=slots,
    )  # fmt: skip
    try:
        yield runner
    finally:
        runner.close()


def load(runner: ModelRunner, folder: Path) -> str:
    runner.adapters.find_sites()
    adapter = runner.adapters.prepare(read_adapter(str(folder), 512), folder.name)
    runner.adapters.install(adapter)
    return adapter.adapter_id


@torch.no_grad()
def logits_of(base: Path, adapter: Path | None, tokens: list[int]) -> torch.Tensor:
    return merged(base, adapter)(torch.tensor([tokens])).logits[0, -1]


def step(adapters: list[str], lengths: list[int], turn: int = 0) -> list[Segment]:
    """Sequences of different tokens, each in blocks of its own."""
    return [
        Segment(
            [(7 * place + 3 * at + turn) % 120 + 2 for at in range(length)],
            0,
            [2 * place, 2 * place + 1],
            adapter=adapter,
        )
        for place, (adapter, length) in enumerate(zip(adapters, lengths, strict=True))
    ]


def last_rows(segments: list[Segment]) -> list[int]:
    ends = [sum(len(one.token_ids) for one in segments[: i + 1]) for i in range(len(segments))]
    return [end - 1 for end in ends]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mistral", "gpt2", "mixtral"])
def test_each_row_of_a_mixed_batch_has_the_logits_of_its_merged_model(
    tiny_model: Callable[..., Path], tmp_path: Path, architecture: str, kernels: Kernels
) -> None:
    base = tiny_model(architecture)
    targets = ("q_proj", "o_proj") if architecture == "mixtral" else targets_of(architecture)
    one = save_adapter(tmp_path / "one", base, rank=5, seed=1, targets=targets)
    two = save_adapter(
        tmp_path / "two",
        base,
        seed=2,
        targets=targets[:1],
        rank_of=lambda name: 3 if ".1." in name else 4,
        settings={
            "use_rslora": True,
            "rank_pattern": {r".*\.1\..*": 3},
            "alpha_pattern": {targets[0]: 2.5},
            "fan_in_fan_out": architecture == "gpt2",
        },
    )
    folders: dict[str, Path | None] = {"": None}
    with runner_of(base, kernels) as runner:
        folders |= {load(runner, folder): folder for folder in (one, two)}
        first, second = runner.adapters.ids
        # Rows of one adapter are not adjacent. Repeated steps run captured.
        for turn in range(7):
            segments = step([first, "", second, first], [5, 1, 7, 2], turn)
            found = runner.forward(segments, last_rows(segments)).clone()
            if 0 < turn < 6:
                continue
            for row, segment in zip(found, segments, strict=True):
                wanted = logits_of(base, folders[segment.adapter], list(segment.token_ids))
                assert torch.allclose(row, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


def test_the_adapter_of_the_guide_changes_the_answers_of_the_demo_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (Path(kvrelay.__file__).parents[1] / "docs/guides/adapters.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    with runner_of(Path(resolve_model("demo")), "auto") as runner:
        adapter = load(runner, tmp_path / "random-lora")
        segments = step(["", adapter], [7, 7])
        same = Segment(segments[0].token_ids, 0, segments[1].blocks, adapter=adapter)
        base, adapted = runner.forward([segments[0], same], last_rows(segments)).float()
    assert base.argmax() != adapted.argmax()


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_native_rows_do_not_depend_on_the_adapters_of_other_rows(
    tiny_model: Callable[..., Path], tmp_path: Path, weights: Literal["auto", "int8"]
) -> None:
    base = tiny_model("llama")
    one, two = (save_adapter(tmp_path / f"{i}", base, seed=i, rank=i + 1) for i in (1, 2))
    with runner_of(base, "auto", weights) as runner:
        first, second = load(runner, one), load(runner, two)
        mixed = step([first, "", second, first, ""], [4, 4, 4, 4, 4])
        rows = last_rows(mixed)
        together = runner.forward(mixed, rows).clone()
        for adapter in ("", first, second):
            same = step([adapter] * 5, [4] * 5)
            alone = runner.forward(same, rows)
            for place, segment in enumerate(mixed):
                if segment.adapter == adapter:
                    assert torch.equal(alone[place], together[place])
        assert not torch.allclose(together[0], runner.forward(step([""] * 5, [4] * 5), rows)[0])


def test_int8_weights_change_the_base_alone(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    base = tiny_model("llama")
    folder = save_adapter(tmp_path / "one", base, size=0.5)
    tokens = list(range(2, 12))
    with runner_of(base, "auto", "int8") as runner:
        adapter = load(runner, folder)
        segments = [Segment(tokens, 0, [0, 1], adapter=adapter), Segment(tokens, 0, [2, 3])]
        found = runner.forward(segments, [9, 19])
        for row, own in zip(found, (folder, None), strict=True):
            wanted = logits_of(base, own, tokens)
            assert torch.cosine_similarity(row, wanted, dim=0) > 0.98


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_removed_adapter_leaves_the_base_model_and_its_slot(
    tiny_model: Callable[..., Path], tmp_path: Path, kernels: Kernels
) -> None:
    base = tiny_model("llama")
    one, two = (save_adapter(tmp_path / f"{i}", base, seed=i) for i in (1, 2))
    loaded = load_model(str(base))
    options = {"kv_bytes": 2**22, "block_size": 16, "kernels": kernels, "adapter_slots": 1}
    runner = ModelRunner.of(loaded, **options)  # type: ignore[arg-type]
    before = runner.forward(step([""], [6]), [5]).clone()
    first = load(runner, one)
    changed = runner.forward(step([first], [6]), [5]).clone()
    assert not torch.allclose(before, changed)
    with pytest.raises(ModelRefused, match="as many as adapters"):
        load(runner, two)
    runner.adapters.remove(first)
    with pytest.raises(InvalidArgument, match="is not loaded here"):
        runner.forward(step([first], [6]), [5])
    second = load(runner, two)
    assert not torch.allclose(runner.forward(step([second], [6]), [5]), changed)
    assert torch.equal(runner.forward(step([""], [6]), [5]), before)
    # The last step had an adapter. The next runner of the model must not.
    runner.forward(step([second], [6]), [5])
    runner.close()
    again = ModelRunner.of(loaded, **options)  # type: ignore[arg-type]
    assert torch.equal(again.forward(step([""], [6]), [5]), before)
    assert load(again, one) == first
    assert torch.equal(again.forward(step([first], [6]), [5]), changed)
    again.close()


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (
            ("lm_head",),
            "output heads, embeddings, experts and kv_b_proj of latent attention are not supported",
        ),
        (
            ("embed_tokens",),
            "output heads, embeddings, experts and kv_b_proj of latent attention are not supported",
        ),
    ],
)
def test_layers_that_adapters_cannot_change_are_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, targets: tuple[str, ...], reason: str
) -> None:
    base = tiny_model("llama")
    with (
        runner_of(base, "torch") as runner,
        pytest.raises(ModelRefused, match=reason),
    ):
        load(runner, save_adapter(tmp_path / "one", base, targets=targets))


def test_adapters_of_other_models_and_damaged_ones_are_refused(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    base = tiny_model("llama")
    other = build("llama", tmp_path / "wider", hidden_size=96)
    deeper = build("llama", tmp_path / "deeper-base", num_hidden_layers=3)
    with runner_of(base, "torch") as runner:
        with pytest.raises(ModelRefused, match="the adapter is for another model"):
            load(runner, save_adapter(tmp_path / "other", other))
        with pytest.raises(ModelRefused, match="are not finite in float32"):
            load(runner, save_adapter(tmp_path / "nan", base, size=float("nan")))
        with pytest.raises(ModelRefused, match="has no linear layer"):
            load(runner, save_adapter(tmp_path / "deeper", deeper))
    with (
        runner_of(deeper, "torch") as runner,
        pytest.raises(ModelRefused, match="it has no factors for 7 layers"),
    ):
        load(runner, save_adapter(tmp_path / "shallow", base))


@pytest.mark.parametrize("targets", [("q_proj",), ("v_proj", "o_proj"), ("up_proj", "gate_proj")])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.sweep(3)
def test_an_adapter_of_any_size_is_refused_or_computes_numbers(
    tiny_model: Callable[..., Path], tmp_path: Path, kernels: Kernels, targets: tuple[str, ...]
) -> None:
    base, loaded = tiny_model("llama"), 0
    with runner_of(base, kernels, slots=20) as runner:
        for exponent in range(0, 38, 2):
            folder = save_adapter(
                tmp_path / str(exponent), base, targets=targets, size=10.0**exponent
            )
            try:
                name = load(runner, folder)
            except ModelRefused:
                continue
            loaded += 1
            for turn in range(8):
                segments = step([name], [30], turn)
                assert runner.forward(segments, last_rows(segments)).isfinite().all(), exponent
    assert 1 < loaded < 19


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_adapter_whose_products_overflow_is_refused_and_leaves_nothing(
    tiny_model: Callable[..., Path], tmp_path: Path, kernels: Kernels
) -> None:
    base = tiny_model("llama")
    good = save_adapter(tmp_path / "good", base)
    with runner_of(base, kernels, slots=1) as runner:
        with pytest.raises(ModelRefused, match="values overflow with the adapter"):
            load(runner, save_adapter(tmp_path / "large", base, size=1e30))
        assert (runner.adapters.held, runner.adapters.nbytes) == ((), 0)
        segments = step([load(runner, good)], [5])
        logits = runner.forward(segments, last_rows(segments))[0]
        wanted = logits_of(base, good, list(segments[0].token_ids))
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
