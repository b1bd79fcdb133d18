"""A draft model changes how many tokens a step gives and nothing else, whatever it drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.speculation import (
    ALWAYS_FIVE,
    PLAIN,
    answers,
    check_aborts,
    check_moves,
    local,
    settled,
    specs,
)
from support.speculation import config as ngram_config
from support.tiny_models import VOCAB, build
from support.worker_harness import load_of, workers

from decode_worker.draft_model import CATCH_UP_TOKENS
from decode_worker.draft_passes import DraftRequest, run_draft_passes
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.runner import ModelRunner
from kvrelay.errors import ConfigError, InvalidArgument, ModelRefused
from kvrelay.types.requests import SequenceSpec
from kvrelay.worker.runtime.draft_files import check_draft_files
from kvrelay.worker_messages import RunLocal

# Bytes of 48 blocks of 4 tokens in float32: one sequence of the model's 192 tokens. One layer with
# 2 heads of 12 values takes 768 bytes per block.
ONE_SEQUENCE = 48 * 768

PASSES = "decode_worker.draft_model.run_draft_passes"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model of one layer with other random weights than the model's."""
    return build("llama", tmp_path_factory.mktemp("small"), num_hidden_layers=1)


def config(model: Path, kv_memory: str = "4MiB", /, **speculation: object) -> ClusterConfig:
    wanted = {"kind": "draft", "model": str(model), "tokens": 5, "max_batch": 12, "memory": "4MiB"}
    return ngram_config(kv_memory, **{**wanted, **speculation})


def always_wrong(runner: ModelRunner, asked: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
    drafts = run_draft_passes(runner, asked)
    return [tuple((token + 1) % VOCAB for token in draft) for draft in drafts]


def sometimes_right(runner: ModelRunner, asked: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
    return [
        tuple(token if token % 5 and index < 3 else index for index, token in enumerate(draft))
        for draft in run_draft_passes(runner, asked)
    ]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", ["itself", "random", "wrong", "mixed", "few blocks"])
async def test_answers_are_the_same_as_without(
    tiny_model: Callable[..., Path], small: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = tiny_model("llama")
    requests = specs(36)
    expected, _, _ = await local(model, PLAIN, requests)
    settings = config(small if kind == "random" else model)
    if kind == "few blocks":
        settings = config(small, "76KiB", memory=ONE_SEQUENCE)
    if kind in ("wrong", "mixed"):
        monkeypatch.setattr(PASSES, always_wrong if kind == "wrong" else sometimes_right)
    found, drafted, accepted = await local(model, settings, requests)
    assert found == expected
    assert drafted > 0
    if kind == "itself":
        # Greedy answers are drafted as they come, except those that penalties change.
        assert accepted > 0.3 * drafted
    if kind in ("itself", "mixed"):
        assert 0 < accepted < drafted


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
async def test_a_sequence_that_moves_in_the_middle_goes_on_as_it_would_have(
    tiny_model: Callable[..., Path], seed: int
) -> None:
    model = tiny_model("llama")
    await check_moves(model, config(model), specs(12, seed), seed)


async def test_a_model_that_drafts_for_itself_is_always_right(
    tiny_model: Callable[..., Path],
) -> None:
    """So rewinding and catching up leave the KV of the draft model as it must be."""
    model = tiny_model("llama")
    prompt = tuple(range(2, 12))
    params = replace(ALWAYS_FIVE, logit_bias=(), max_tokens=100, ignore_eos=True)
    async with workers(model, config(model), "decode-0") as running:
        session = await running.session("decode-0")
        await session.send(RunLocal(SequenceSpec("a", 0, prompt, len(prompt), params)))
        await answers(session, 1)
        load = await load_of(session.info)
        assert load.accepted_tokens == load.draft_tokens > 70
        await settled(running)


async def test_a_long_prompt_is_caught_up_with_over_several_steps(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    sizes: list[list[int]] = []

    def counted(runner: ModelRunner, asked: Sequence[DraftRequest]) -> object:
        sizes.append([len(one.token_ids) for one in asked])
        return run_draft_passes(runner, asked)

    monkeypatch.setattr(PASSES, counted)
    params = replace(ALWAYS_FIVE, logit_bias=(), max_tokens=20, ignore_eos=True)
    prompt = tuple(2 + index % 100 for index in range(160))
    async with workers(model, config(model), "decode-0") as running:
        session = await running.session("decode-0")
        for name in "ab":
            await session.send(RunLocal(SequenceSpec(name, 0, prompt, len(prompt), params)))
        await answers(session, 2)
        load = await load_of(session.info)
        assert load.accepted_tokens == load.draft_tokens > 0
        await settled(running)
    large = [size for step in sizes for size in step if size > 6]
    assert sum(large) >= 2 * len(prompt)
    assert all(sum(size for size in step if size > 6) <= CATCH_UP_TOKENS for step in sizes)


@pytest.mark.parametrize("after", [0, 7])
async def test_a_draft_model_that_fails_ends_no_answer(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    model = tiny_model("llama")
    requests = specs(24)
    expected, _, _ = await local(model, PLAIN, requests)
    forward = ModelRunner.forward
    calls = 0

    def failing(runner: ModelRunner, *arguments: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls > after:
            raise RuntimeError("out of memory")
        return forward(runner, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "forward", failing)
    found, drafted, _ = await local(model, config(model), requests)
    assert found == expected
    assert (drafted > 0) == (after > 0)
    # Once for each sequence at most, and not again in each step.
    assert calls <= after + len(requests)


async def test_aborts_in_the_middle_leave_nothing_behind(
    tiny_model: Callable[..., Path],
) -> None:
    model = tiny_model("llama")
    await check_aborts(model, config(model, "80KiB"))


def test_the_memory_of_the_draft_model_is_known_before_it_is_loaded(
    tiny_model: Callable[..., Path], small: Path
) -> None:
    model = tiny_model("llama")
    settings = config(small)
    found = check_draft_files(settings, str(model))
    assert found is not None
    runner = ModelRunner.load(str(small), dtype="float32", block_size=4, kv_bytes=2**22)
    assert found.kv_bytes == 2**22 >= runner.kv_bytes
    assert found.weight_bytes > 0
    assert check_draft_files(PLAIN, str(model)) is None


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        ({"vocab_size": VOCAB + 1}, ConfigError, "has a vocabulary of 129 tokens, and the served"),
        ({"tokenizer": "{}"}, ConfigError, "has other tokenizer files than the served model"),
        ({"weights": b""}, ModelRefused, "truncated safetensors file"),
        ({"memory": ONE_SEQUENCE - 1}, ConfigError, "do not hold the draft model's KV of one"),
        ({"absent": True}, ConfigError, "decode.speculation.model: model '"),
    ],
)
async def test_a_draft_model_that_does_not_fit_is_refused_in_one_sentence(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    change: dict[str, object],
    kind: type[InvalidArgument],
    reason: str,
) -> None:
    from kvrelay.launch.checks.memory_plan import plan_memory

    model = tiny_model("llama")
    sizes = {"vocab_size": VOCAB, **{k: v for k, v in change.items() if k == "vocab_size"}}
    folder = build("llama", tmp_path / "draft", num_hidden_layers=1, **sizes)
    if "tokenizer" in change:
        (folder / "tokenizer.json").write_text(str(change["tokenizer"]))
    if "weights" in change:
        (folder / "model.safetensors").write_bytes(b"")
    if "absent" in change:
        folder = tmp_path / "absent"
    wanted = config(folder, **({"memory": change["memory"]} if "memory" in change else {}))
    update = wanted.model.model_copy(update={"path": str(model)})
    with pytest.raises(kind) as refused:
        plan_memory(wanted.model_copy(update={"model": update}))
    assert reason in refused.value.message
    assert len(refused.value.message.splitlines()) == 1
    # The worker refuses it as well: on its host the folder may be another one.
    with pytest.raises(ExceptionGroup) as group:
        async with workers(model, wanted, "decode-0"):
            pass
    (error,) = group.value.exceptions
    assert isinstance(error, kind)
    assert reason in str(error)
