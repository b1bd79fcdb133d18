"""A tenant that fills the batch with long answers, and another one that asks for little beside
it.
"""

from __future__ import annotations

import random

from simulation.clients import Client
from simulation.history import Plan
from simulation.simulation import Result, Simulation
from simulation.toy_engine import POISON

from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.types.requests import SamplingParams

STEP_S = 0.1, 0.15  # least and most: a large model, whose long answers take many seconds
LONG, FLOOD = 60, 24  # tokens, answers
ASKS, PAUSE_S = 12, 1.0
TIMEOUT_S = 300.0


class Hostile(Simulation):
    """Without faults. `flood`: whether the hostile tenant is there; all else is the same."""

    def __init__(self, seed: int, flood: bool) -> None:
        super().__init__(seed)
        rng = random.Random(seed)
        self._kinds = []
        self.cluster.loop.step_s = STEP_S
        self.cluster.sizes = sizes = {"prefill": rng.choice((0, 1)), "decode": rng.choice((1, 2))}
        self.cluster.num_blocks = {"prefill": 64, "decode": rng.choice((64, 160))}
        self.cluster.config = self.cluster.config.model_copy(
            update={"router": self.cluster.config.router.model_copy(update={"max_queue": 64})}
        )
        self.cluster.policy = AutoscalingPolicy()
        assert sizes["decode"] * self.cluster.config.decode.max_batch < FLOOD, "the batch is full"
        hostile = [
            self._plan(rng, f"hog{number}", "hog", LONG, rng.random() * 0.5)
            for number in range(FLOOD)
        ]
        asked = [
            self._plan(rng, f"ask{number}", "other", 1, 2.0 + number * PAUSE_S)
            for number in range(ASKS)
        ]
        self._plans = [*(hostile if flood else ()), *asked]

    def _plan(self, rng: random.Random, name: str, tenant: str, max_tokens: int, at: float) -> Plan:
        prompt = tuple(rng.randrange(1, POISON) for _ in range(rng.randint(1, 20)))
        sampling = SamplingParams(max_tokens=max_tokens, seed=rng.randrange(100), ignore_eos=True)
        return Plan(name, at, prompt, sampling, TIMEOUT_S, tenant=tenant)

    def of(self, tenant: str) -> list[Client]:
        return [client for client in self.clients if client.plan.tenant == tenant]

    @property
    def waits(self) -> list[float]:
        """How long each small request took, in virtual seconds."""
        return [client.record.ends[0].time - client.plan.at for client in self.of("other")]


def run(seed: int, flood: bool) -> tuple[Hostile, Result]:
    simulation = Hostile(seed, flood)
    return simulation, simulation.run()
