"""What the launcher tells of a worker that has ended, without Ray."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError
from structlog.testing import capture_logs

from kvrelay.launch.launcher import RayLauncher


class Dying:
    """Stands for a RayWorker whose process ends with this error."""

    worker_id, node_id = "decode-0", "node"

    def __init__(self, error: Exception, *, is_taken_back: bool = False) -> None:
        self._error = error
        self.is_taken_back = is_taken_back

    async def run(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        # In Ray's words.
        (
            OutOfMemoryError("2 worker(s) were killed due to the node running low on memory."),
            "its host ran out of memory",
        ),
        (ActorDiedError(), "its process ended"),
    ],
)
async def test_the_cause_of_a_death_is_told_once(error: Exception, cause: str) -> None:
    nothing: Any = None
    launcher = RayLauncher(nothing, nothing)
    worker: Any = Dying(error)
    launcher._workers[worker.worker_id] = worker
    await launcher._watch(worker)
    assert launcher.alive() == {}
    assert launcher.cause_of_death("decode-0") == cause
    assert launcher.cause_of_death("decode-0") == "its process ended"


async def test_a_worker_that_is_taken_back_while_it_waits_has_not_died() -> None:
    nothing: Any = None
    launcher = RayLauncher(nothing, nothing)
    for is_taken_back in (True, False):
        worker: Any = Dying(ActorDiedError(), is_taken_back=is_taken_back)
        launcher._workers[worker.worker_id] = worker
        with capture_logs() as logged:
            await launcher._watch(worker)
        event = "worker_ended" if is_taken_back else "worker_died"
        assert [one["event"] for one in logged] == [event]
        assert launcher._failed.empty() == is_taken_back
