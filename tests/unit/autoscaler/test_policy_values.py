"""Any value in any field of a policy is refused with its line, or scales in finite steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.pool_sizes import decide_pools
from autoscaler.queueing_model import QueueingModel, Requests, WorkerSpeed
from autoscaler.replay import Moment, Replay
from autoscaler.scaling_policy import PoolSnapshot
from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.config.config_file import load_policy
from kvrelay.config.section import MAX_POOL
from kvrelay.errors import ConfigError

SPEED = WorkerSpeed(
    prefill_tokens_per_s=4000,
    decode_tokens_per_s=800,
    itl_s=0.01,
    max_batch=16,
    kv_tokens=50_000,
    start_s=10,
)
WHOLE: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[3] / "configs" / "autoscaling" / "queue-depth.yaml").read_text()
)
ODD = [
    *(0, 1, -1, 2, 80, 1024, 1025, 10**30, 10**5000),
    *(0.0, -0.0, 5e-324, 1e-12, 1e-3, 0.05, 0.5, 0.9, 0.999999999, 1e9, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
    *(True, False, None, "", "1", "five", [], [1], {}, {"a": 1}),
]

Key = tuple[str | int, ...]


def numbers(section: Any, key: Key = ()) -> Iterator[Key]:
    """The keys of all numbers in the policy."""
    inner = (
        section.items()
        if isinstance(section, dict)
        else enumerate(section)
        if isinstance(section, list)
        else ()
    )
    for name, value in inner:
        yield from numbers(value, (*key, name))
    if isinstance(section, int | float) and not isinstance(section, bool):
        yield key


KEYS = list(numbers(WHOLE))


def with_value(key: Key, value: object) -> dict[str, Any]:
    changed = copy.deepcopy(WHOLE)
    inner: Any = changed
    for name in key[:-1]:
        inner = inner[name]
    inner[key[-1]] = value
    return changed


def loaded(policy: dict[str, Any]) -> AutoscalingPolicy | None:
    """The policy as a file of the user's; None if it is refused. Any other error fails."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "policy.yaml"
        file.write_text(_yaml(policy))
        try:
            return load_policy(file)
        except ConfigError:
            return None


def _yaml(policy: dict[str, Any]) -> str:
    # Python writes no whole number of more than 4300 digits.
    huge = "x" * 40
    text = yaml.safe_dump(_replaced(policy, huge))
    return text.replace(huge, "1" + "0" * 5000)


def _replaced(value: Any, huge: str) -> Any:
    match value:
        case dict():
            return {name: _replaced(inner, huge) for name, inner in value.items()}
        case list():
            return [_replaced(inner, huge) for inner in value]
        case int() if value > 10**4000:
            return huge
    return value


def test_all_numbers_of_a_policy_are_swept() -> None:
    named = {key[-1] for key in KEYS}
    fields = {*AutoscalingPolicy.model_fields, *WHOLE["decode"], "target"}
    assert named == fields - {"rebalance", "prefill", "decode", "metrics", "profile"}


@cache
def sizes_under(policy: AutoscalingPolicy) -> list[int]:
    """Of both pools in turn, at 40 looks under a load and 20 without it."""
    cluster, replay, sizes = QueueingModel(SPEED, 1, 1), Replay(policy), []
    for look in range(1, 61):
        rate = 5.0 if look <= 40 else 0.0
        load = Requests(rate, rate * 700, rate * 100)
        pools = cluster.step(load, min(policy.interval_s, 60.0))
        for verdict in replay.decide(Moment(look * policy.interval_s, pools)):
            cluster.resize(verdict.pool, verdict.after)
            sizes.append(verdict.after)
    return sizes


@pytest.mark.parametrize("key", KEYS, ids=lambda key: ".".join(map(str, key)))
@pytest.mark.sweep(4)
def test_any_number_is_refused_or_scales_in_finite_steps(key: Key) -> None:
    accepted = 0
    for value in ODD:
        policy = loaded(with_value(key, value))
        if policy is None:
            continue
        accepted += 1
        assert policy.interval_s >= 0.1
        assert not isinstance(value, str | bool | list | dict)
        sizes = sizes_under(policy)
        assert all(type(size) is int for size in sizes)
        most = [rules.max_replicas for rules in (policy.prefill, policy.decode) if rules]
        assert 0 <= min(sizes) <= max(sizes) <= max(most) <= MAX_POOL
    assert accepted, "or nothing has been tried"


targets = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
metrics = st.lists(
    st.sampled_from(["queue_depth", "queue_tokens", "ttft_p95_ms", "kv_occupancy"]), max_size=3
)


@given(metrics, targets, st.floats(0, 0.99), st.floats(0, 3600), st.integers(1, 10**6))
def test_a_pool_that_may_be_empty_wakes_whatever_the_policy(
    names: list[str], target: float, tolerance: float, delay_s: float, waiting: int
) -> None:
    policy = loaded(
        {
            "prefill": {
                "min_replicas": 0,
                "max_replicas": 4,
                "metrics": [{"name": name, "target": target} for name in names],
                "tolerance": tolerance,
                "upscale_delay_s": delay_s,
            }
        }
    )
    if policy is None:
        return
    seen = {
        "prefill": PoolSnapshot(0, 0, {"queue_depth": waiting, "queue_tokens": 100.0 * waiting})
    }
    states = {pool: state for pool, (_, state) in decide_pools(seen, policy, {}, 0.0).items()}  # type: ignore[arg-type]
    decision, _ = decide_pools(seen, policy, states, delay_s)["prefill"]  # type: ignore[arg-type]
    assert decision.desired > 0
