"""What `kvrelay serve` says on a terminal about workers that come and go."""

from __future__ import annotations

from kvrelay.cli.views.worker_news import WorkerNews
from kvrelay.types.workers import EndedWorker


def ended(worker: str, reason: str, *, drained: bool) -> dict[str, EndedWorker]:
    return {worker: EndedWorker(worker, reason, drained)}


def test_deaths_successors_and_stops_are_told_in_this_order() -> None:
    news = WorkerNews(
        {
            "prefill-0": "ready",
            "decode-0": "ready",
            "decode-1": "draining",
            "decode-2": "starting",
            "decode-4": "ready",
            "decode-5": "ready",
        }
    )
    states = {"prefill-0": "ready", "decode-2": "ready", "decode-3": "starting"}
    assert not news.is_complete(states)
    reasons = {
        **ended("decode-0", "its process ended", drained=False),
        **ended("decode-1", "the pool is wanted at 2", drained=True),
        **ended("decode-4", "an operator asked for it", drained=True),
        **ended("decode-5", "its process ended", drained=False),
    }
    assert news.lines(states, reasons) == [
        "decode-0 has died: its process ended; the log has more",
        "decode-5 has died: its process ended; the log has more",
        "2 new workers start",
        "decode-2 serves",
        "decode-1 has stopped: the pool is wanted at 2",
        "decode-4 has stopped: an operator asked for it",
    ]
    assert news.is_complete(states)
    assert news.lines(states, reasons) == []


def test_a_stop_is_no_death_before_the_controller_says_why() -> None:
    """A worker that stops removes its entry; the controller tells the reason when it has ended."""
    news = WorkerNews({"decode-0": "ready", "decode-1": "ready"})
    states = {"decode-1": "ready"}
    assert news.lines(states, {}) == []
    reasons = ended("decode-0", "an operator asked for it", drained=True)
    assert news.lines(states, reasons) == ["decode-0 has stopped: an operator asked for it"]


def test_a_worker_that_switches_its_pool_has_not_died() -> None:
    news = WorkerNews({"decode-0": "ready", "decode-1": "ready"})
    assert news.lines({"decode-0": "draining", "decode-1": "ready"}, {}) == []
    assert news.lines({"decode-1": "ready"}, {}) == []
    both = {"decode-0": "ready", "decode-1": "ready"}
    assert news.lines(both, {}) == ["decode-0 serves"]


def test_a_worker_without_an_entry_or_a_reason_has_died_in_the_end() -> None:
    """As that of a host that was lost, with the controller that started it."""
    news = WorkerNews({"decode-0": "ready", "decode-1": "ready"})
    told = [line for _ in range(20) for line in news.lines({"decode-1": "ready"}, {})]
    assert told == ["decode-0 has died; the log has more", "a new worker starts"]


def test_workers_that_ended_with_their_controller_are_not_told_one_by_one() -> None:
    news = WorkerNews({"decode-0": "ready"})
    news.forget_served()
    assert [line for _ in range(20) for line in news.lines({}, {})] == []
    assert news.lines({"decode-1": "ready"}, {}) == ["decode-1 serves"]
