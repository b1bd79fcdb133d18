from __future__ import annotations

import pytest

from kvrelay.types.control_plane import ScalingDecision
from router.observability.heartbeat import DECISIONS, Heartbeat
from router.observability.metrics import MAX_SAMPLES, WINDOW_S, Metrics, Window


def test_nothing_measured_is_none() -> None:
    window = Window()
    assert window.p95(0.0) is None
    window.add(0.0, 1.0)
    assert window.p95(WINDOW_S) == 1.0
    assert window.p95(WINDOW_S + 0.1) is None


@pytest.mark.parametrize(("count", "p95"), [(1, 1.0), (2, 2.0), (20, 19.0), (100, 95.0)])
def test_nearest_rank(count: int, p95: float) -> None:
    window = Window()
    for one in reversed(range(count)):
        window.add(0.0, one + 1.0)
    assert window.p95(1.0) == p95


def test_samples_are_bounded() -> None:
    window = Window()
    for one in range(2 * MAX_SAMPLES):
        window.add(0.0, float(one))
    p95 = window.p95(0.0)
    assert p95 is not None
    assert p95 >= MAX_SAMPLES


def test_scaling_decisions_by_direction() -> None:
    metrics = Metrics("demo")
    metrics.scaled(ScalingDecision(0.0, "decode", 1, 2, "busy"))
    metrics.scaled(ScalingDecision(1.0, "decode", 2, 1, "idle"))
    for direction in ("up", "down"):
        labels = {"model_name": "demo", "pool": "decode", "direction": direction}
        assert metrics.cluster.get_sample_value("kvrelay_scaling_decision_total", labels) == 1.0


def heartbeat_of(metrics: Metrics) -> Heartbeat:
    """One that only counts decisions."""
    return Heartbeat("router-0", None, metrics, None, None)  # type: ignore[arg-type]


def counted(metrics: Metrics) -> float | None:
    labels = {"model_name": "demo", "pool": "decode", "direction": "up"}
    return metrics.cluster.get_sample_value("kvrelay_scaling_decision_total", labels)


def test_a_scaling_decision_counts_once_whatever_the_clock_of_its_controller_says() -> None:
    metrics = Metrics("demo")
    heartbeat = heartbeat_of(metrics)
    history = [ScalingDecision(50.0, "decode", 1, 2, "before the start of the router")]
    heartbeat._count(history)
    for count, unix_time in enumerate((100.0, 90_000.0, 101.0, 7.0, 102.0), 1):
        history.insert(0, ScalingDecision(unix_time, "decode", 1, 2, "busy"))
        heartbeat._count(history)
        heartbeat._count(history)
        assert counted(metrics) == count


def test_decisions_that_are_read_again_after_a_loss_do_not_count_again() -> None:
    metrics = Metrics("demo")
    heartbeat = heartbeat_of(metrics)
    heartbeat._count(())
    history = [ScalingDecision(float(at), "decode", 1, 2, "busy") for at in range(60)][::-1]
    for last in range(60, 0, -1):
        heartbeat._count(history[last - 1 : last - 1 + DECISIONS])
    assert counted(metrics) == 60
    heartbeat._count(())
    heartbeat._count(history[30 : 30 + DECISIONS])
    assert counted(metrics) == 60
    assert len(heartbeat._seen or ()) == 60


def test_a_message_of_many_tokens_is_as_many_observations() -> None:
    metrics = Metrics("demo")
    # The stream is asked at its first token only
    metrics.tokens(None, 4, 1.0, 1.2)  # type: ignore[arg-type]
    metrics.tokens(None, 0, 1.2, 1.3)  # type: ignore[arg-type]  # none was left after a stop string
    read = metrics.registry.get_sample_value
    labels = {"model_name": "demo"}
    assert read("kvrelay_generation_tokens_total", labels) == 4
    assert read("kvrelay_inter_token_latency_seconds_count", labels) == 4
    assert read("kvrelay_inter_token_latency_seconds_sum", labels) == pytest.approx(0.2)
    assert read("kvrelay_inter_token_latency_seconds_bucket", labels | {"le": "0.05"}) == 4
    assert read("kvrelay_inter_token_latency_seconds_bucket", labels | {"le": "0.04"}) == 0
    assert metrics.itl.p95(1.3) == pytest.approx(0.05)
