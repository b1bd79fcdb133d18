"""The utilisation that a decode worker reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.worker_harness import load_of, workers

from kvrelay.config.schema import ClusterConfig
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.steps.measured_step_cost import StepCost
from kvrelay.worker_messages import RunLocal, TokenBatch

CONFIG = ClusterConfig.model_validate(
    {"model": {"dtype": "float32"}, "kv": {"memory": "4MiB"}, "decode": {"max_batch": 4}}
)
PROMPT = tuple(range(2, 26))
ANSWER = 8


async def test_it_comes_from_the_steps_that_served_requests(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    ended = StepCost.ended

    def noted(cost: StepCost, tokens: int, seconds: float, now: float) -> None:
        steps.append(tokens)
        ended(cost, tokens, seconds, now)

    monkeypatch.setattr(StepCost, "ended", noted)
    async with workers(tiny_model(), CONFIG, "decode-0") as running:
        session = await running.session("decode-0")
        assert (await load_of(session.info)).busy_share == 0.0
        assert steps == [], "the proving steps are no load"
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
        await session.send(RunLocal(SequenceSpec("r", 0, PROMPT, len(PROMPT), params)))
        batch = await session.event()
        while not (isinstance(batch, TokenBatch) and batch.sequences[0].finish_reason):
            batch = await session.event()
        assert steps == [len(PROMPT)] + [1] * (ANSWER - 1)
        assert 0 < (await load_of(session.info)).busy_share <= 1
