"""What a report says of pools under a load that steps up and down again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvrelay.config.autoscaling_policy import AutoscalingPolicy
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.loadtest.report.timeline import Timeline
from kvrelay.types.workers import POOLS, PoolName

# Between a decision and the look that the recorder took, and of an autoscaler's own looks
_SLACK_S = 1.5


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    holds: bool
    found: str


def verdict(
    report: Report, policy: AutoscalingPolicy, pool: PoolName, up_s: float, down_s: float
) -> tuple[Finding, ...]:
    """Of a load that was high between `up_s` and `down_s`, seconds after its start, and that `pool`
    should follow.
    """
    timeline, rules = report.timeline, policy.pool(pool)
    assert timeline is not None, "a test with --admin has one"
    assert rules is not None, "its pool has a policy"
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
        Finding(f"the {other} pool stayed", len(sizes[other]) == 1, arrows(sizes[other])),
        Finding(
            "up, then down: no flapping", turns(mine) <= 1 and mine[-1] == mine[0], arrows(mine)
        ),
        Finding(
            f"grew upscale_delay_s {rules.upscale_delay_s:g} after the step or later, and before "
            f"its end",
            bool(ups) and up_s + rules.upscale_delay_s - _SLACK_S <= ups[0] <= down_s,
            ", ".join(f"{at - up_s:.1f} s after it" for at in ups) or "never",
        ),
        Finding(
            f"shrank after downscale_delay_s {rules.downscale_delay_s:g} each, after the load",
            bool(downs)
            and downs[0] > down_s
            and all(one >= rules.downscale_delay_s - _SLACK_S for one in waits),
            ", ".join(f"{at - down_s:.1f} s after it" for at in downs) or "never",
        ),
        Finding(
            "every decision has its reason",
            all(one.reason for one in changes),
            f"{len(changes)} decisions",
        ),
        Finding(
            "workers came and went as wanted",
            _followed(timeline, pool),
            arrows(_ready(timeline, pool)) + " ready",
        ),
    )


def distinct(values: Sequence[int]) -> list[int]:
    """Without repetitions of what came just before."""
    return [value for index, value in enumerate(values) if not index or value != values[index - 1]]


def turns(sizes: Sequence[int]) -> int:
    """How often a pool that grew began to shrink, or the other way around."""
    changes = [after - before for before, after in pairwise(sizes)]
    return sum(one * other < 0 for one, other in pairwise(changes))


def arrows(sizes: Sequence[int]) -> str:
    return " → ".join(map(str, sizes))


def _ready(timeline: Timeline, pool: PoolName) -> list[int]:
    return distinct([one.pools[pool].workers for one in timeline.samples])


def _followed(timeline: Timeline, pool: PoolName) -> bool:
    last = timeline.samples[-1].pools[pool]
    return (
        last.workers == last.desired
        and max(_ready(timeline, pool)) > timeline.samples[0].pools[pool].workers
    )
