"""The findings of `benchmarks/elastic.py`, each with a run for which it does not hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from step_verdict import arrows, distinct, turns, verdict

from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.report.timeline import PoolSample, Sample, Scaling, Timeline

POLICY = AutoscalingPolicy.model_validate(
    {
        "prefill": {"max_replicas": 3, "upscale_delay_s": 5, "downscale_delay_s": 20},
        "decode": {"max_replicas": 3},
    }
)
UP, DOWN = 30.0, 60.0
GOOD = {0: 1, 36: 2, 42: 3, 90: 2, 115: 1}  # wanted sizes from these seconds on


def pool(size: int, wanted: int) -> PoolSample:
    return PoolSample(size, wanted, 0, 0, 0, 0.0, 0.0)


def report(
    prefill: dict[int, int] = GOOD, decode: dict[int, int] | None = None, late: int = 3
) -> Report:
    """Workers come and go `late` seconds after they are wanted or not."""

    def size(sizes: dict[int, int], at: int) -> int:
        return [size for since, size in sizes.items() if since <= max(0, at)][-1]

    pools = {"prefill": prefill, "decode": decode or {0: 1}}
    samples = tuple(
        Sample(
            float(at),
            0,
            0,
            {name: pool(size(sizes, at - late), size(sizes, at)) for name, sizes in pools.items()},
        )
        for at in range(140)
    )
    decisions = [
        Scaling(float(at), name, before, after, "because")
        for name, sizes in pools.items()
        for (_, before), (at, after) in pairwise(sizes.items())
    ]
    rows = (Row(1.0, 0.0, ttft_s=0.1, e2e_s=0.2),)
    return Report({}, (), rows, Timeline(samples, tuple(decisions)))


def broken(found: Report) -> list[str]:
    return [one.what for one in verdict(found, POLICY, "prefill", UP, DOWN) if not one.holds]


def test_a_pool_that_follows_has_nothing_against_it() -> None:
    assert broken(report()) == []


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (replace(report(), rows=(Row(0.0, 0.0, error="UNAVAILABLE"),)), "no request failed"),
        (
            report({0: 1, 31: 2, 95: 1}),
            "grew after upscale_delay_s 5, and before the end of the step",
        ),
        (
            report({0: 1, 62: 2, 95: 1}),
            "grew after upscale_delay_s 5, and before the end of the step",
        ),
        (report({0: 1, 36: 2, 90: 1, 100: 2, 125: 1}), "the pool did not flap"),
        (report({0: 1, 36: 2}), "the pool did not flap"),
        (
            report({0: 1, 36: 3, 90: 2, 95: 1}),
            "shrank after the step, each time after downscale_delay_s 20",
        ),
        (
            report({0: 1, 36: 2, 58: 1}),
            "shrank after the step, each time after downscale_delay_s 20",
        ),
        (report({0: 1}), "the prefill pool grew"),
        (report(decode={0: 1, 50: 2, 100: 1}), "the decode pool kept its size"),
        (report(late=200), "the number of workers followed the decisions"),
    ],
)
def test_what_is_wrong_is_found(found: Report, what: str) -> None:
    assert what in broken(found)


def test_a_decision_without_a_reason_is_found() -> None:
    good = report()
    assert good.timeline is not None
    mute = tuple(replace(one, reason="") for one in good.timeline.decisions)
    assert broken(replace(good, timeline=replace(good.timeline, decisions=mute))) == [
        "every decision has a reason"
    ]


def test_sizes_in_words() -> None:
    assert distinct([1, 1, 2, 2, 1]) == [1, 2, 1]
    assert arrows([1, 3, 1]) == "1 → 3 → 1"
    assert [turns(sizes) for sizes in ([1], [1, 2, 3], [1, 2, 1], [1, 2, 1, 2])] == [0, 0, 1, 2]
