"""A little of what `make fuzz` and `make soak` do for long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_damaged_pushes_harm_nobody() -> None:
    out = run("fuzz_frames.py", "--seconds", "1")
    assert " DataLoss" in out
    assert " FailedPrecondition" in out


@pytest.mark.long
def test_handoffs_leave_nothing_behind() -> None:
    out = run("soak_handoffs.py", "--handoffs", "150")
    for ending in ("commit: committed", "abort: Cancelled", "cancel: CancelledError"):
        assert ending in out
