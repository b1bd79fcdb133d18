from __future__ import annotations

from collections.abc import Mapping

from autoscaler.replay import Moment, Replay
from autoscaler.scaling_policy import PoolSnapshot
from kvrelay.config.autoscaling_policy import AutoscalingPolicy, MetricName

POLICY = AutoscalingPolicy.model_validate(
    {
        "decode": {
            "max_replicas": 6,
            "metrics": [{"name": "queue_depth", "target": 2}],
            "upscale_delay_s": 2,
            "downscale_delay_s": 4,
            "max_step_up": 2,
        }
    }
)


def moment(at: float, queue: float, size: int = 1) -> Moment:
    metrics: Mapping[MetricName, float] = {"queue_depth": queue}
    return Moment(
        at, {"decode": PoolSnapshot(size, size, metrics), "prefill": PoolSnapshot(1, 1, metrics)}
    )


def test_sizes_are_the_policys_own_and_follow_its_delays_and_steps() -> None:
    replay = Replay(POLICY)
    queues = [0, 10, 10, 10, 10, 10, 10, 0, 0, 0, 0, 0]
    verdicts = [one for at, queue in enumerate(queues) for one in replay.decide(moment(at, queue))]
    assert [one.after for one in verdicts] == [1, 1, 1, 3, 3, 3, 5, 5, 5, 5, 5, 4]
    assert [one.before for one in verdicts][1:] == [one.after for one in verdicts][:-1]
    assert {one.pool for one in verdicts} == {"decode"}, "prefill has no policy"
    assert "max_step_up" in verdicts[3].reason
    assert "not yet for upscale_delay_s" in verdicts[2].reason


def test_it_begins_with_the_recorded_size() -> None:
    assert Replay(POLICY).decide(moment(0, 8, size=4))[0].before == 4
