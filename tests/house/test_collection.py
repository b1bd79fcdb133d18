"""The suite has the same tests in each process: xdist refuses to start where processes differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def collected(hash_seed: str) -> list[str]:
    """The ids of all tests, in the order in which pytest runs them."""
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", "--collect-only"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ids_do_not_depend_on_the_process() -> None:
    """A set or an address in an id, or in the order of parameters, shows as a difference."""
    one, other = collected("1"), collected("2")
    assert len(one) > 1000
    assert one == other
