"""One model on two ranks: the same tokens as one process, and nothing left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ragged_sequences import RaggedSequences, random_prompts
from support.tiny_models import build

from kvrelay.engine.base.step_input import Part, Step
from kvrelay.engine.model.checkpoint import find_checkpoint
from kvrelay.engine.parallel.forward import _one_later
from kvrelay.engine.parallel.group import RankGroup
from kvrelay.engine.parallel.plan import check_degree
from kvrelay.engine.parallel.rank_lost import RankLost
from kvrelay.engine.parallel.step_message import step_from_numbers, step_to_numbers
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.errors import ConfigError, ModelRefused

SETTINGS: dict[str, Any] = {"block_size": 4, "kv_bytes": 1 << 20, "kernels": "torch"}
PROMPT = [2 + i * 7 % 90 for i in range(61)]


@contextmanager
def two_ranks(folder: Path, **settings: Any) -> Iterator[ModelRunner]:
    """And makes sure that the other rank's process is gone afterwards."""
    with RankGroup(2) as group:
        yield ModelRunner.load(str(folder), group=group, **{**SETTINGS, **settings})
    for pid in group.pids:
        assert not Path(f"/proc/{pid}").exists()


def logits(runner: ModelRunner) -> torch.Tensor:
    blocks = list(range(3, 3 + runner.layout.blocks_for(len(PROMPT))))
    return runner.forward([Segment(PROMPT, 0, blocks)], range(len(PROMPT)))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("architecture", "kv_dtype"),
    [
        ("llama", "int8"),
        ("llama", "int4"),
        pytest.param("qwen3", "auto", marks=pytest.mark.long),
        pytest.param("gemma2", "auto", marks=pytest.mark.long),
        ("mixtral", "auto"),
    ],
)
def test_ragged_and_chunked_as_one_process(
    architecture: str, kv_dtype: str, tiny_model: Callable[[str], Path]
) -> None:
    """Sums over two ranks' parts are rounded in another way, by no more than float32's last
    places.
    """
    alone = ModelRunner.load(str(tiny_model(architecture)), kv_dtype=kv_dtype, **SETTINGS)
    with two_ranks(tiny_model(architecture), kv_dtype=kv_dtype, kernels="auto") as shared:
        assert shared.weight_bytes == alone.weight_bytes
        assert shared.layout.block_bytes == alone.layout.block_bytes
        assert shared.kernels == "torch"
        assert "2 ranks" in shared.without_kernels
        if kv_dtype == "auto":  # a value that is rounded to another integer differs by more
            difference = (logits(shared) - logits(alone)).abs().max()
            print(f"{architecture}: largest logit difference {difference:.2e}")
            assert difference < 1e-4
        answers = []
        for runner in (alone, shared):
            sequences = RaggedSequences(runner, random_prompts(), chunk=7, contiguous=False)
            while not sequences.done:
                sequences.step()
            answers.append(sequences.tokens)
    assert answers[0] == answers[1]


@pytest.mark.long
def test_long_steps_layers_and_the_death_of_a_rank(tmp_path: Path) -> None:
    """A step of more numbers than go at once; whom layers are told to; and then rank 1 is
    killed.
    """
    folder = build("llama", tmp_path, max_position_embeddings=2048)
    tokens = [2 + i % 90 for i in range(1500)]
    alone = ModelRunner.load(str(folder), **SETTINGS)
    with two_ranks(folder) as shared:
        last = [
            runner.forward([Segment(tokens, 0, range(375))], [1499]) for runner in (alone, shared)
        ]
        torch.testing.assert_close(*last, rtol=0, atol=1e-4)

        told: list[int] = []
        shared.run([Segment(PROMPT, 0, range(16))], told.append)
        assert told == [0, 1]

        (pid,) = shared.rank_pids
        assert not shared.lost()
        os.kill(pid, signal.SIGKILL)
        # Gloo raises, or it waits for the dead rank without end. A worker's watch sees both.
        errors: list[RankLost] = []
        step = threading.Thread(target=step_of, args=(shared, errors), daemon=True)
        step.start()
        for _ in range(1000):  # the socket may be closed before the process has ended
            if "ended with signal" in shared.lost():
                break
            time.sleep(0.01)
        assert shared.lost() == f"rank 1 of 2 (process {pid}) ended with signal 9"
        step.join(5)
        assert errors or step.is_alive(), "no step of a group that lost a rank has a result"


def step_of(runner: ModelRunner, errors: list[RankLost]) -> None:
    """Runs a step, and keeps what it raises."""
    try:
        runner.run([Segment(PROMPT, 0, range(16))])
    except RankLost as error:
        errors.append(error)


def test_a_layer_is_told_when_all_ranks_have_stored_it() -> None:
    told: list[int] = []
    stored_here = _one_later(told.append)
    for layer in range(3):
        stored_here(layer)
    assert told == [0, 1], "layer 2 may not be there yet on the others"


def test_what_cannot_be_shared_is_refused_before_it_is_loaded(
    tiny_model: Callable[..., Path],
) -> None:
    for architecture, reason in {
        "gpt2": "transformers has no tensor parallel plan for GPT2LMHeadModel",
        "olmo2": "plan of transformers gathers its heads",
        "deepseek_v3": "plan of transformers leaves attention whole",
    }.items():
        with pytest.raises(ModelRefused, match=reason):
            check_degree(find_checkpoint(str(tiny_model(architecture))), 2)
    with pytest.raises(
        ModelRefused,
        match=r"does not divide 4 attention heads and 2 KV heads; "
        r"allowed are 1, 2$",
    ):
        check_degree(find_checkpoint(str(tiny_model("llama"))), 4)
    with RankGroup(2) as group, pytest.raises(ConfigError, match="int8 needs the native kernels"):
        ModelRunner.load(
            str(tiny_model("llama")), group=group, weights="int8", block_size=4, kv_bytes=1 << 20
        )


PARTS = st.builds(
    Part, st.integers(0, 9), st.integers(1, 9), st.integers(0, 9), st.lists(st.integers(0, 10**6))
)


@given(st.lists(st.integers(0, 2**31)), st.lists(PARTS), st.lists(st.integers(0, 2**31)))
def test_a_step_survives_as_numbers(
    token_ids: list[int], parts: list[Part], rows: list[int]
) -> None:
    step = Step(token_ids, parts, rows)
    assert step_from_numbers(step_to_numbers(step)) == step
