from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.queueing_model import QueueingModel, Requests, WorkerSpeed

SPEED = WorkerSpeed(
    prefill_tokens_per_s=1000,
    decode_tokens_per_s=200,
    itl_s=0.02,
    max_batch=10,
    kv_tokens=10_000,
    start_s=5,
)


def after(
    model: QueueingModel, seconds: int, requests: float, prompt: float = 100, answer: float = 20
):  # type: ignore[no-untyped-def]
    for _ in range(seconds):
        pools = model.step(Requests(requests, requests * prompt, requests * answer), 1.0)
    return pools


def test_a_load_that_fits_leaves_no_queue() -> None:
    pools = after(QueueingModel(SPEED, 1, 1), 60, requests=4)
    assert pools["prefill"].metrics["queue_depth"] == pytest.approx(0, abs=1e-6)
    assert pools["decode"].metrics["queue_depth"] == pytest.approx(0, abs=1e-6)
    assert pools["decode"].metrics["ttft_p95_ms"] == pytest.approx(100)  # a prompt's own time
    assert 0 < pools["decode"].metrics["kv_occupancy"] < 1


def test_too_long_prompts_queue_before_prefill_and_too_long_answers_before_decode() -> None:
    prompts = after(QueueingModel(SPEED, 1, 4), 10, requests=4, prompt=500, answer=2)
    assert prompts["prefill"].metrics["queue_tokens"] > 1000
    assert prompts["decode"].metrics["queue_depth"] == 0
    answers = after(QueueingModel(SPEED, 1, 1), 60, requests=4, prompt=10, answer=500)
    assert answers["prefill"].metrics["queue_depth"] == pytest.approx(0, abs=1e-6)
    assert answers["decode"].metrics["queue_depth"] > 100
    assert answers["decode"].metrics["ttft_p95_ms"] > 1000


def test_without_prefill_workers_the_decode_workers_do_both() -> None:
    alone = QueueingModel(SPEED, 0, 1)
    pools = after(alone, 60, requests=1)
    assert pools["decode"].metrics["queue_depth"] == pytest.approx(0, abs=1e-6)
    assert alone.unfinished < 5
    assert "queue_wait_p95_ms" not in pools["prefill"].metrics


def test_a_new_worker_serves_after_its_start_and_one_that_goes_is_gone_at_once() -> None:
    model = QueueingModel(SPEED, 1, 1)
    model.resize("decode", 3)
    assert [after(model, 1, 0)["decode"].ready for _ in range(6)] == [1, 1, 1, 1, 3, 3]
    model.resize("decode", 5)
    model.resize("decode", 4)  # the one that starts goes first
    assert after(model, 1, 0)["decode"].ready == 3
    assert after(model, 5, 0)["decode"].ready == 4
    model.resize("decode", 1)
    assert after(model, 1, 0)["decode"].ready == 1


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.floats(1, 2000), st.floats(1, 500)), min_size=1, max_size=20
    ),
    st.integers(0, 3),
    st.integers(1, 3),
    st.floats(0.1, 30),
)
def test_all_that_comes_is_served_once_it_stops_coming(
    load: list[tuple[float, float, float]], prefill: int, decode: int, seconds: float
) -> None:
    model = QueueingModel(replace(SPEED, kv_tokens=100_000), prefill, decode)
    for number, prompt, answer in load:
        pools = model.step(Requests(number, number * prompt, number * answer), seconds)
        for pool in pools.values():
            assert all(value >= 0 for value in pool.metrics.values())
            assert pool.metrics.get("kv_occupancy", 0) <= 1
    total = sum(number for number, _, _ in load)
    assert model.unfinished <= total + 1e-6
    # The largest load takes a decode worker that also prefills 77 minutes.
    for _ in range(90):
        if model.unfinished < 1e-3:
            break
        model.step(Requests(), 60.0)
    assert model.unfinished < 1e-3


@given(st.floats(200, 2000))
def test_prompts_take_at_most_the_whole_time_of_decode_workers(prompt: float) -> None:
    seconds = []

    class Recorded(QueueingModel):
        def _decode(self, workers: int, seconds_: float, decoding_s: float) -> None:
            seconds.append(decoding_s)
            super()._decode(workers, seconds_, decoding_s)

    after(Recorded(SPEED, 0, 1), 20, requests=10, prompt=prompt)
    assert min(seconds) >= 0


def test_time_in_one_step_or_in_many_is_the_same_time() -> None:
    coarse, fine = QueueingModel(SPEED, 1, 1), QueueingModel(SPEED, 1, 1)
    last = coarse.step(Requests(120, 12_000, 2400), 30.0)
    assert after(fine, 30, requests=4)["decode"].metrics == pytest.approx(last["decode"].metrics)
