"""What the launcher tells of a worker that has ended, without Ray."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError

from kvrelay.launch.launcher import RayLauncher


class Dying:
    """Stands for a RayWorker whose process ends with this error."""

    worker_id, node_id = "decode-0", "node"

    def __init__(self, error: Exception) -> None:
        self._error = error

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
