"""Limits on processes: a cluster that could not start all of them says so before it starts any."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from kvrelay.errors import Unavailable
from kvrelay.launch.checks import process_limit
from kvrelay.launch.checks.process_limit import check_processes, process_limits


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(process_limit, "_CONTROL_GROUPS", (tmp_path,))
    monkeypatch.setattr(os, "getuid", lambda: 0)
    return tmp_path


@pytest.mark.parametrize(("workers", "routers"), [(1, 1), (2, 4), (7, 1)])
def test_the_limit_of_a_control_group_holds_for_root_too(
    group: Path, workers: int, routers: int
) -> None:
    (group / "pids.current").write_text("90\n")
    least = 90 + 200 + 40 * workers + 20 * (routers - 1)
    (group / "pids.max").write_text(f"{least}\n")
    check_processes(workers, routers)
    (group / "pids.max").write_text(f"{least - 1}\n")
    words = f"pids.max .* allows {least - 1} .* 90 run already, .* {workers} workers .*pids-limit"
    with pytest.raises(Unavailable, match=words):
        check_processes(workers, routers)


@pytest.mark.parametrize("content", ["max\n", "", None])
def test_a_control_group_without_a_limit_limits_nothing(group: Path, content: str | None) -> None:
    if content is not None:
        (group / "pids.max").write_text(content)
    assert not list(process_limits())


def test_the_limit_of_a_user_counts_the_threads_that_run(
    group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = len(os.listdir("/proc/self/task"))
    user = Path("/proc/self").stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: user or 0)
    monkeypatch.setattr(process_limit, "_ROOT", -1)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (30, 30))
    (limit,) = process_limits()
    assert limit.most == 30
    assert limit.running >= running
    with pytest.raises(Unavailable, match=r"ulimit -u allows 30 .* raise it: ulimit -u 4096"):
        check_processes(2)


def test_no_limit_of_a_user_is_none(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_limit, "_ROOT", -1)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert not list(process_limits())
