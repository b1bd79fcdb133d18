"""What is found out about a machine."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvrelay.process import machine
from kvrelay.process.machine import Machine, OtherPrograms, busy_cores

CARD = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 71\nGPU UUID: \t GPU-0\n"


def test_gpus_are_named_by_their_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bus in ("0000:4b:00.0", "0000:5b:00.0"):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(CARD)
    monkeypatch.setattr(machine, "_NVIDIA", tmp_path)
    found = Machine.here()
    assert found.gpus == ("NVIDIA H100 80GB HBM3",) * 2
    assert str(found).endswith("GiB, NVIDIA H100 80GB HBM3, NVIDIA H100 80GB HBM3")


def test_memory_is_what_the_control_group_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Machine.here().memory_bytes
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_CGROUP_LIMITS", (str(limit), str(tmp_path / "absent")))
    limit.write_text("max\n")
    assert Machine.here().memory_bytes >= whole
    limit.write_text("1048576\n")
    assert Machine.here().memory_bytes == 2**20


def stat(*times: int) -> str:
    return f"cpu  {' '.join(map(str, times))} 7 7\ncpu0 1 2 3 4\n"


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        ((5, 0, 5, 100, 0, 0, 0, 0), (5, 0, 5, 200, 0, 0, 0, 0), 0.0),
        ((5, 0, 5, 100, 0, 0, 0, 0), (45, 5, 5, 150, 0, 0, 0, 5), 0.5),
        ((5, 0, 5, 100, 0, 0, 0, 0), (5, 0, 5, 100, 100, 0, 0, 0), 0.0),
        ((5, 0, 5, 100, 0, 0, 0, 0), (5, 0, 5, 100, 0, 0, 0, 0), 0.0),
        ((5, 0, 5, 100, 0, 0, 0, 0), (4, 0, 105, 99, 0, 0, 0, 0), 1.0),
    ],
    ids=["idle", "half", "waits for disks", "no time passed", "a counter went back"],
)
def test_busy_cores(
    before: tuple[int, ...],
    after: tuple[int, ...],
    share: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "stat"
    file.write_text(stat(*before))
    monkeypatch.setattr(machine.time, "sleep", lambda _: file.write_text(stat(*after)))
    assert busy_cores(0.5, file) == pytest.approx(share * (os.cpu_count() or 1))


@pytest.mark.parametrize(
    ("own", "others"), [(0.0, 1.0), (0.25, 0.75), (5.0, 0.0)], ids=["none", "some", "all"]
)
def test_the_cores_of_other_programs_are_without_those_of_this_process(
    own: float, others: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`own`, `others`: shares of the host."""
    cores = os.cpu_count() or 1
    used, now = iter([1.0, 1.0 + own * cores * 10]), iter([50.0, 60.0])
    monkeypatch.setattr(machine, "_own_seconds", lambda: next(used))
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: next(now)))
    file = tmp_path / "stat"
    file.write_text(stat(5, 0, 5, 100, 0, 0, 0, 0))
    found = OtherPrograms(file)
    file.write_text(stat(105, 0, 5, 100, 0, 0, 0, 0))
    assert found.cores() == pytest.approx(others * cores)


@pytest.mark.parametrize("text", [None, "", "cpu x y\n", "intr 1\n", "cpu 1 2\n"], ids=repr)
def test_a_host_that_does_not_tell_is_not_busy(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "stat"
    if text is not None:
        file.write_text(text)
    assert busy_cores(0.0, file) == 0.0
