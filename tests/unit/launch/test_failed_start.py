"""When workers that end before any has served end the cluster, and with which reason."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import Internal, KvRelayError, NotFound, Unavailable
from kvrelay.launch.failed_start import MOST_DEATHS, FailedStart, FailedStarts, failed_start
from kvrelay.launch.model_controller import never_served

LOST = failed_start("decode-0", None, "The actor died unexpectedly.\nIts process was killed.")
AGAIN_THE_SAME = [
    TypeError("paged_attention() missing 1 required keyword-only argument: 'ragged_batch'"),
    FileNotFoundError(2, "No such file or directory", "/nowhere"),
    OSError(28, "No space left on device"),
    AttributeError("no layer_idx\nand a second line"),
    ImportError("libcudart.so: cannot open shared object file"),
]
PERHAPS_NOT = [
    Unavailable("Redis: away"),
    ConnectionResetError(),
    TimeoutError(),
    MemoryError(),
    asyncio.CancelledError(),
]


@pytest.mark.parametrize("cause", AGAIN_THE_SAME, ids=repr)
def test_what_comes_back_with_each_start_ends_the_first(cause: Exception) -> None:
    error = FailedStarts().verdict(failed_start("decode-0", cause, str(cause)))
    assert isinstance(error, Internal)
    assert error.message.startswith(
        f"decode-0 failed before it could serve: {type(cause).__name__}: "
    )
    assert len(error.message.splitlines()) == 1


def test_a_model_that_is_not_on_the_host_is_told_as_it_is() -> None:
    cause = NotFound("model 'x': there is no such folder")
    assert FailedStarts().verdict(failed_start("decode-0", cause, str(cause))) is cause


@pytest.mark.parametrize("cause", [None, *PERHAPS_NOT], ids=repr)
def test_what_another_start_may_cure_is_tried_some_times(cause: Any) -> None:
    starts = FailedStarts()
    errors = [
        starts.verdict(failed_start(f"decode-{i}", cause, "it went.\nsomehow"))
        for i in range(MOST_DEATHS)
    ]
    assert errors[:-1] == [None] * (MOST_DEATHS - 1)
    assert isinstance(errors[-1], Unavailable)
    assert f"decode-{MOST_DEATHS - 1}: it went; if memory was short" in errors[-1].message
    assert "lower kv.memory" in errors[-1].message


@given(st.text(), st.text())
def test_a_reason_is_one_line(said: str, words: str) -> None:
    for cause in (None, TypeError(said), Unavailable(said)):
        failed = failed_start("decode-0", cause, words)
        assert failed.reason
        assert len(failed.reason.splitlines()) == 1


class Failing:
    """A launcher whose workers end, one after the other."""

    def __init__(self, *failures: FailedStart) -> None:
        self.failures: asyncio.Queue[FailedStart] = asyncio.Queue()
        for failure in failures:
            self.failures.put_nowait(failure)

    async def failed(self) -> FailedStart:
        return await self.failures.get()


@pytest.mark.parametrize(
    "failures", [[failed_start("decode-0", AGAIN_THE_SAME[0], "")], [LOST] * MOST_DEATHS]
)
async def test_nothing_has_served(failures: list[FailedStart]) -> None:
    launcher: Any = Failing(*failures)
    actuator: Any = SimpleNamespace(has_served=False)
    with pytest.raises(KvRelayError):
        await asyncio.wait_for(never_served(launcher, actuator), 60)


async def test_what_has_served_is_replaced_whatever_it_died_of() -> None:
    launcher: Any = Failing(
        failed_start("decode-0", AGAIN_THE_SAME[0], ""), *[LOST] * 3 * MOST_DEATHS
    )
    actuator: Any = SimpleNamespace(has_served=True)
    waiting = asyncio.create_task(never_served(launcher, actuator))
    while not launcher.failures.empty():
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
