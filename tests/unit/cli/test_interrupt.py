"""Ctrl-C while a command runs a cluster."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from kvrelay.cli.terminal import interrupt


def test_it_is_confirmed_before_the_end_and_cancels_the_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said: list[str] = []

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            # As the stop of a cluster.
            await asyncio.sleep(0)
            said.append(capsys.readouterr().err)

    with pytest.raises(KeyboardInterrupt):
        interrupt.run(work())
    assert said == ["kvrelay: stopping\n"]


def test_results_and_errors_are_those_of_the_work() -> None:
    async def work(error: Exception | None) -> int:
        if error is not None:
            raise error
        return 7

    assert interrupt.run(work(None)) == 7
    with pytest.raises(ValueError, match="bad"):
        interrupt.run(work(ValueError("bad")))
    with pytest.raises(asyncio.CancelledError):
        interrupt.run(work(asyncio.CancelledError()))  # type: ignore[arg-type]
