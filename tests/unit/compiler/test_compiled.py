"""Files are compiled once, and no compiler outlives the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvrelay.compiler import compiled
from kvrelay.compiler.compiled import NativeUnavailable, build

# Notes its file. For `slow.cpp` it starts a second process and hangs as long as the file `hang` is
# there.
_COMPILER = """#!/bin/sh
cd {folder}
for word in "$@"; do
  case "$word" in *.cpp) echo "$word" >> compiled ;; esac
  [ "$last" = -o ] && target="$word"
  last="$word"
done
case "$*" in
  *slow.cpp*)
    if [ -e hang ]; then
      sleep 600 &
      echo "$$ $!" > hanging.part
      mv hanging.part hanging
      wait
    fi ;;
esac
echo done > "$target"
"""
_BUILD = """
import sys
from pathlib import Path
from kvrelay.compiler.compiled import build
build([sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3]))
"""
# Each in its turn finds the folder new, made by another, or about to be removed.
_TURNS = """
import shutil, sys
from pathlib import Path
from kvrelay.compiler.compiled import _only_builder
folder = Path(sys.argv[1])
for _ in range(500):
    with _only_builder(folder):
        (folder / "alone").touch(exist_ok=False)
        shutil.rmtree(folder)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Builds two files with a compiler that notes what it compiles."""
    sources = tmp_path / "kernels"
    sources.mkdir()
    for name in ("fast", "slow"):
        (sources / f"{name}.cpp").write_text(name)
    script = tmp_path / "c++"
    script.write_text(_COMPILER.format(folder=tmp_path))
    script.chmod(0o700)
    return [sys.executable, "-c", _BUILD, *map(str, (script, sources, tmp_path / "made.so"))]


def compiled_files(tmp_path: Path) -> list[str]:
    return sorted(Path(line).stem for line in (tmp_path / "compiled").read_text().split())


def wait_for(condition: object) -> None:
    assert callable(condition)
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_of_several_processes_one_compiles(tmp_path: Path, command: list[str]) -> None:
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert compiled_files(tmp_path) == ["fast", "slow"]
    assert (tmp_path / "made.so").is_file()
    assert not list(tmp_path.glob("*.build"))


def test_a_folder_that_its_builder_removes_at_any_moment_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _TURNS, str(tmp_path / "made.build")]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4


def test_a_killed_process_leaves_no_compiler_and_the_next_one_goes_on(
    tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "hang").touch()
    process = subprocess.Popen(command)
    wait_for((tmp_path / "hanging").exists)
    pids = [int(word) for word in (tmp_path / "hanging").read_text().split()]
    wait_for(lambda: list(tmp_path.glob("*.build/fast.o")))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids))
    (tmp_path / "hang").unlink()
    assert subprocess.run(command, timeout=60).returncode == 0
    assert compiled_files(tmp_path) == ["fast", "slow", "slow"]


def test_a_compiler_that_takes_too_long_is_ended_with_all_its_processes(
    tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "hang").touch()
    script, sources, target = map(Path, command[-3:])
    with pytest.raises(NativeUnavailable, match="took longer than 1 s"):
        build([str(script)], sources, target, timeout_s=1.0)
    pids = [int(word) for word in (tmp_path / "hanging").read_text().split()]
    wait_for(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids))


def test_whether_a_start_compiles_is_known_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "part" / "kernels"
    sources.mkdir(parents=True)
    (sources / "one.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert not compiled.is_compiled(sources)
    assert compiled.compiled(sources).answer() == 42
    assert compiled.is_compiled(sources)
    (sources / "one.cpp").write_text('extern "C" int answer() { return 43; }\n')
    assert not compiled.is_compiled(sources)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    assert compiled.is_compiled(sources)
