"""Scenarios and loads of simulations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.config.schema import ClusterConfig
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.workload import PlannedRequest
from kvrelay.planning.profile import Profile
from kvrelay.planning.step_cost_model import StepCostModel
from kvrelay.simulation.scenario import Delays, Failure, Scenario
from kvrelay.simulation.simulation import Simulation

VOCAB = 1000
KV_TOKEN_BYTES = 1024
COSTS: dict[str, Any] = {
    "prefill_base_s": 0.004,
    "prefill_token_s": 6e-5,
    "prefill_token_context_s": 1e-9,
    "decode_base_s": 0.012,
    "decode_sequence_s": 2e-4,
    "decode_context_token_s": 4e-8,
    "handoff_base_s": 0.001,
    "handoff_byte_s": 1e-9,
    "start_s": 5.0,
    "role_change_s": 1.0,
    "kind": "measured",
}


def profile(max_model_len: int = 8192, **costs: float) -> Profile:
    """Returns a profile with these costs instead of the default ones."""
    return Profile(StepCostModel(**(COSTS | costs)), KV_TOKEN_BYTES, max_model_len, VOCAB)


def scenario(
    prefill: int = 1,
    decode: int = 1,
    worker: Profile | None = None,
    *,
    config: dict[str, Any] | None = None,
    failures: Iterable[tuple[str, float]] = (),
    policy: dict[str, Any] | None = None,
    delays: Delays | None = None,
    routers: int = 1,
) -> Scenario:
    """Returns a scenario of equal workers."""
    worker = worker or profile()
    sections = {"kv": {"memory": "64MiB"}} | (config or {})
    return Scenario(
        ClusterConfig.model_validate(sections),
        {"prefill": (worker,) * prefill, "decode": (worker,) * decode},
        None if policy is None else AutoscalingPolicy.model_validate(policy),
        tuple(Failure(*one) for one in failures),
        delays or Delays(),
        routers,
    )


def poisson(
    rate: float,
    count: int,
    *,
    prompt: tuple[int, int] = (100, 400),
    answer: tuple[int, int] = (1, 60),
    seed: int = 0,
    shared: int = 0,
) -> Iterator[PlannedRequest]:
    """Yields requests of a Poisson process. The first `shared` tokens of all prompts are equal."""
    random = Random(seed)
    at = 0.0
    prefix = tuple(random.choices(range(VOCAB), k=shared))
    for _ in range(count):
        at += random.expovariate(rate)
        rest = tuple(random.choices(range(VOCAB), k=random.randint(*prompt)))
        output = random.randint(*answer)
        yield PlannedRequest(at, None, prefix + rest, output, random.getrandbits(31))


def run(cluster: Scenario, plan: Iterable[PlannedRequest], **options: Any) -> Report:
    """Simulates and returns the report."""
    return Simulation(cluster, plan, {}, **options).run()
