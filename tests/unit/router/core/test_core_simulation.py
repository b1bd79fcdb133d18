from __future__ import annotations

import pytest
from support.router_simulation import Simulation


@pytest.mark.parametrize("first", range(0, 200, 20))
@pytest.mark.sweep(3)
def test_every_request_ends_once_with_the_right_tokens(first: int) -> None:
    """Twenty histories each; a failure names its seed, and `python
    tests/support/router_simulation.py` runs more.
    """
    for seed in range(first, first + 20):
        try:
            Simulation(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_histories_hold_what_they_are_meant_to_survive() -> None:
    faults = sum((Simulation(seed).run().faults for seed in range(30)), start=Simulation(0).faults)
    for kind in ("crash", "twice", "refuse", "fail", "drain", "cancel", "complete"):
        assert faults[kind] > 20, kind


def test_one_seed_is_one_history() -> None:
    assert Simulation(3).run().trace.digest() == Simulation(3).run().trace.digest()
    assert Simulation(3).run().trace.digest() != Simulation(4).run().trace.digest()
