"""The profile of a worker that has a share of a core."""

from __future__ import annotations

from dataclasses import replace

import pytest
from look_ahead_cluster import slowed
from support import simulated


@pytest.mark.parametrize("bends", [(), ((2, 0.001), (8, 0.002))])
def test_steps_take_longer_by_the_share_and_the_start_does_not(
    bends: tuple[tuple[int, float], ...],
) -> None:
    profile = simulated.profile()
    profile = replace(profile, costs=replace(profile.costs, decode_bends=bends))
    slow, costs = slowed(profile, 0.2).costs, profile.costs
    assert slow.decode_s(16, 4000) == pytest.approx(5 * costs.decode_s(16, 4000))
    assert slow.prompt_s(600, 512) == pytest.approx(5 * costs.prompt_s(600, 512))
    assert slow.handoff_s(10**6) == pytest.approx(5 * costs.handoff_s(10**6))
    assert slow.start_s == costs.start_s
