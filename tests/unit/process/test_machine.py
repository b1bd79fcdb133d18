"""What is found out about a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.process import machine
from kvrelay.process.machine import Machine

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
