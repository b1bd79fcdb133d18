"""Checks the report of a load that steps up and down: did the pools follow? Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.report.timeline import Timeline
from kvrelay.types.workers import POOLS, PoolName

# Tolerance for the polling intervals of the recorder and of the autoscaler.
_SLACK_S = 1.5


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    what: str
    holds: bool
    found: str


def verdict(
    report: Report, policy: AutoscalingPolicy, pool: PoolName, up_s: float, down_s: float
) -> tuple[Finding, ...]:
    """Returns the findings for a load that was high between `up_s` and `down_s`, in seconds after
    its start. `pool` should follow the load.
    """
    timeline, rules = report.timeline, policy.pool(pool)
    assert timeline is not None, "the test requires --admin"
    assert rules is not None, "the policy must have rules for the pool"
    sizes = {
        name: distinct([one.pools[name].desired for one in timeline.samples]) for name in POOLS
    }
    other = POOLS[pool == "prefill"]
    mine = sizes[pool]
    changes = [one for one in timeline.decisions if one.pool == pool]
    ups = [one.at_s for one in changes if one.after > one.before]
    downs = [one.at_s for one in changes if one.after < one.before]
    waits = [after - before for before, after in pairwise([*ups[-1:], *downs])]
    failed = sum(bool(row.error) for row in report.rows)
    return (
        Finding(
            "no request failed", not failed and bool(report.rows), f"{failed} of {len(report.rows)}"
        ),
        Finding(f"the {pool} pool grew", max(mine) > mine[0], arrows(mine)),
        Finding(f"the {other} pool kept its size", len(sizes[other]) == 1, arrows(sizes[other])),
        Finding("the pool did not flap", turns(mine) <= 1 and mine[-1] == mine[0], arrows(mine)),
        Finding(
            f"grew after upscale_delay_s {rules.upscale_delay_s:g}, and before the end of the step",
            bool(ups) and up_s + rules.upscale_delay_s - _SLACK_S <= ups[0] <= down_s,
            ", ".join(f"{at - up_s:.1f} s after the step" for at in ups) or "never",
        ),
        Finding(
            f"shrank after the step, each time after downscale_delay_s {rules.downscale_delay_s:g}",
            bool(downs)
            and downs[0] > down_s
            and all(one >= rules.downscale_delay_s - _SLACK_S for one in waits),
            ", ".join(f"{at - down_s:.1f} s after the end of the step" for at in downs) or "never",
        ),
        Finding(
            "every decision has a reason",
            all(one.reason for one in changes),
            f"{len(changes)} decisions",
        ),
        Finding(
            "the number of workers followed the decisions",
            _followed(timeline, pool),
            arrows(_ready(timeline, pool)) + " ready",
        ),
    )


def distinct(values: Sequence[int]) -> list[int]:
    """Removes values that equal the previous value."""
    return [value for index, value in enumerate(values) if not index or value != values[index - 1]]


def turns(sizes: Sequence[int]) -> int:
    """Returns how often the direction of the size changed."""
    changes = [after - before for before, after in pairwise(sizes)]
    return sum(one * other < 0 for one, other in pairwise(changes))


def arrows(sizes: Sequence[int]) -> str:
    """Formats sizes as `1 → 2 → 1`."""
    return " → ".join(map(str, sizes))


def _ready(timeline: Timeline, pool: PoolName) -> list[int]:
    return distinct([one.pools[pool].workers for one in timeline.samples])


def _followed(timeline: Timeline, pool: PoolName) -> bool:
    last = timeline.samples[-1].pools[pool]
    return (
        last.workers == last.desired
        and max(_ready(timeline, pool)) > timeline.samples[0].pools[pool].workers
    )
