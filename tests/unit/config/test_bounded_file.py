"""Files that no memory holds, such as a device, end with one sentence."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.config.bounded_file import bounded_lines, file_bytes
from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.report import report_file

COMMAND = [sys.executable, "-m", "kvrelay"]
# Bytes of address space for the command, and of a file of zeros that takes no space on a disk.
MOST_MEMORY, HUGE = 8 * 2**30, 20 * 2**30
PLAN = ["plan", "demo", "--trace", "HUGE"]
PROMPT = "cannot be read: larger than the allowed 4 MiB"
LINE = "a line has more than the allowed 16,777,216 characters"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["generate", "--file", "HUGE"], f"--file HUGE {PROMPT}"),
        (["generate", "-"], f"stdin {PROMPT}"),
        ([*PLAN, "--trace-format", "azure"], f"HUGE: {LINE}"),
        ([*PLAN, "--trace-format", "servegen", "--num-requests", "1"], f"HUGE: {LINE}"),
        (["autoscale", "explain", "POLICY", "--metrics", "HUGE.csv"], f"HUGE.csv: {LINE}"),
    ],
)
@pytest.mark.sweep(3)
def test_a_huge_file_is_refused(words: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "HUGE").touch()
    (tmp_path / "HUGE.csv").write_text("seconds,pool,size,ready,queue_depth\n")
    for name in ("HUGE", "HUGE.csv"):
        os.truncate(tmp_path / name, HUGE)
    (tmp_path / "POLICY").write_text("decode:\n  min_replicas: 1\n  max_replicas: 2\n")
    with open("/dev/zero", "rb") as zero:
        found = subprocess.run(
            ["prlimit", f"--as={MOST_MEMORY}", *COMMAND, *words],
            stdin=zero,
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
    assert found.returncode in (1, 2)
    assert found.stderr == f"kvrelay: {told}\n"


def test_a_huge_report_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_file, "_MAX_REPORT", 64)
    (tmp_path / "report").write_text(" " * 65)
    with pytest.raises(InvalidArgument, match="larger than the allowed 64 B"):
        report_file.load(tmp_path / "report")


def test_a_file_of_the_allowed_size_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345678")
    assert file_bytes(file, 8) == b"12345678"
    with pytest.raises(OSError, match="larger than the allowed 7 B"):
        file_bytes(file, 7)


def test_lines_of_the_allowed_length_are_read() -> None:
    assert list(bounded_lines(io.StringIO("12\n\n123\n1"), 4)) == ["12\n", "\n", "123\n", "1"]
    with pytest.raises(OSError, match="a line has more than the allowed 4 characters"):
        list(bounded_lines(io.StringIO("12\n12345"), 4))
