"""Every case of two client libraries against a cluster whose decode workers are killed. Needs PyPI,
unless the environments of the libraries exist. `make clients` runs those of all libraries.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import run_clients

CLIENTS = ("openai", "anthropic")
# Cases that generate nothing, by client.
WITHOUT_TOKENS = {"openai": {"refusals", "models"}, "anthropic": {"count_tokens", "models"}}


def run(folder: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of the benchmark, and its rows."""
    file = folder / "clients.json"
    done = subprocess.run(
        [
            *(sys.executable, run_clients.__file__, "--json", str(file)),
            *("--out", str(folder / "logs"), *options),
        ],
        check=False,
    )
    return done.returncode, json.loads(file.read_text())["cases"]


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_each_case_gives_the_same_answer_when_its_worker_is_killed(tmp_path: Path) -> None:
    """Streamed and not: the same tokens, JSON and calls as without a kill."""
    code, rows = run(tmp_path, *(word for name in CLIENTS for word in ("--client", name)))
    failed = [row for row in rows if row["error"] or row["kill_error"]]
    assert not failed
    assert {row["client"] for row in rows} == set(CLIENTS)
    for row in rows:
        if row["case"] in WITHOUT_TOKENS.get(row["client"], ()):
            assert not row["tokens"], row
        else:
            assert row["tokens"], row
            assert (row["killed"], row["same"]) == (True, True), row
    assert code == 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_router_that_does_not_retry_is_found_out(tmp_path: Path) -> None:
    """So the test above can fail."""
    cases = ("chat", "chat, streamed", "tool loop")
    code, rows = run(
        tmp_path,
        *("--client", "openai", "--attempts", "1"),
        *(word for case in cases for word in ("--case", case)),
    )
    assert code == 1
    assert [row["case"] for row in rows] == list(cases)
    for row in rows:
        assert not row["error"]
        assert "was lost" in row["kill_error"]
        assert not row["same"]
