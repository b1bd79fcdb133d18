"""Folders that last as long as their owner, with real processes, and with creators and sweepers
that are interleaved line by line.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.process import owned_folder
from kvrelay.process.owned_folder import OwnedFolder, remove_abandoned_folders

_OWNER = """
import sys
from pathlib import Path
from kvrelay.process.owned_folder import OwnedFolder
with OwnedFolder("ray", Path(sys.argv[1])) as folder:
    (folder.path / "session").mkdir()
    print(folder.path, flush=True)
    sys.stdin.read()
"""

# Kills an owner before its first line of the module, another before its second line, and so on.
_KILLED_ANYWHERE = """
import itertools, json, os, shutil, signal, sys
from pathlib import Path
from kvrelay.process import owned_folder

PARENT = Path(sys.argv[1])

def kill_after(lines):
    def trace(frame, event, _argument):
        nonlocal lines
        if frame.f_code.co_filename not in (owned_folder.__file__, shutil.__file__):
            return None
        if event == "line":
            lines -= 1
            if lines < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    return trace

for lines in itertools.count():
    child = os.fork()
    if child == 0:
        sys.settrace(kill_after(lines))
        with owned_folder.OwnedFolder("ray", PARENT) as folder:
            (folder.path / "session").mkdir()
        sys.settrace(None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    left = len(os.listdir(PARENT))
    owned_folder.remove_abandoned_folders(PARENT)
    print(json.dumps([left, os.listdir(PARENT)]))
    if not os.WIFSIGNALED(status):
        sys.exit(os.WEXITSTATUS(status))
"""


def _abandoned(parent: Path, name: str = "kvrelay-ray-00000000") -> Path:
    """A folder as a killed owner leaves it."""
    (parent / f"{name}.lock").touch()
    (parent / name).mkdir()
    (parent / name / "session").touch()
    return parent / name


def test_a_folder_lasts_as_long_as_its_owner_uses_it(tmp_path: Path) -> None:
    with OwnedFolder("redis", tmp_path) as folder:
        assert folder.path.parent == tmp_path
        assert folder.path.stat().st_mode & 0o777 == 0o700
        (folder.path / "session").mkdir()
        remove_abandoned_folders(tmp_path)
        assert folder.path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_temporary_files_are_below_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with OwnedFolder("redis") as folder:
        assert folder.path.parent == tmp_path


def test_the_folder_of_a_killed_owner_is_removed_by_the_next_owner(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    path = Path(owner.stdout.readline().strip())
    remove_abandoned_folders(tmp_path)
    assert (path / "session").is_dir(), "the owner lives"
    owner.kill()
    owner.communicate()
    assert path.is_dir()
    with OwnedFolder("redis", tmp_path):
        assert not path.exists()
    assert list(tmp_path.iterdir()) == []


def test_nothing_stays_wherever_an_owner_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED_ANYWHERE, str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rounds = [json.loads(line) for line in shown.splitlines()]
    assert {left for left, _ in rounds} == {0, 1, 2}, "a lock file, and a lock file with a folder"
    assert all(swept == [] for _, swept in rounds)


def test_a_folder_that_cannot_be_removed_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with OwnedFolder("ray", tmp_path) as folder:
        monkeypatch.setattr(owned_folder.shutil, "rmtree", lambda *_, **__: None)
    assert folder.path.is_dir()
    monkeypatch.undo()
    remove_abandoned_folders(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_parent_without_room_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="No space left"):
        OwnedFolder("ray", tmp_path).__enter__()
    remove_abandoned_folders(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["kvrelay-ray", "kvrelay-ray-my-notes", "kvrelay-ray-0000000G", "x-kvrelay-ray-00000000"],
)
def test_folders_with_other_names_stay(tmp_path: Path, name: str) -> None:
    assert (_abandoned(tmp_path, name) / "session").exists()
    remove_abandoned_folders(tmp_path)
    assert (tmp_path / name / "session").exists()
    assert (tmp_path / f"{name}.lock").exists()


def test_a_folder_without_a_lock_file_stays(tmp_path: Path) -> None:
    path = _abandoned(tmp_path)
    (tmp_path / f"{path.name}.lock").unlink()
    remove_abandoned_folders(tmp_path)
    assert (path / "session").exists()


@pytest.mark.parametrize("is_lock", [True, False], ids=["lock file", "folder"])
def test_symbolic_links_are_not_followed(tmp_path: Path, is_lock: bool) -> None:
    other = tmp_path / "other"
    other.mkdir()
    target = _abandoned(other)
    link = tmp_path / target.name
    if is_lock:
        link.mkdir()
        (tmp_path / f"{link.name}.lock").symlink_to(other / f"{target.name}.lock")
    else:
        (tmp_path / f"{link.name}.lock").touch()
        link.symlink_to(target, target_is_directory=True)
    remove_abandoned_folders(tmp_path)
    assert (target / "session").exists()
    assert (other / f"{target.name}.lock").exists()
    assert link.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("suffix", ["", ".lock"], ids=["folder", "lock file"])
def test_the_files_of_another_user_stay(tmp_path: Path, suffix: str) -> None:
    path = _abandoned(tmp_path)
    os.chown(f"{path}{suffix}", 12345, -1)
    remove_abandoned_folders(tmp_path)
    assert (path / "session").exists()


class _Turns:
    """Runs functions in threads, one line of owned_folder.py at a time: as many lines of each as
    `schedule` says, and then in turns.
    """

    def __init__(self, *functions: Callable[[], None]) -> None:
        self._functions = functions
        self._may_go = [threading.Semaphore(0) for _ in functions]
        self._paused = threading.Semaphore(0)
        self._running = set(range(len(functions)))
        self._errors: list[Exception] = []

    def run(self, schedule: list[tuple[int, int]]) -> None:
        for number in range(len(self._functions)):
            threading.Thread(target=self._run, args=(number,)).start()
            self._paused.acquire()
        bursts = (number for number, lines in schedule for _ in range(lines))
        for number in itertools.chain(bursts, itertools.cycle(range(len(self._functions)))):
            if number in self._running:
                self._may_go[number].release()
                self._paused.acquire()
            if not self._running:
                break
        for error in self._errors:
            raise error

    def _run(self, number: int) -> None:
        def trace(frame: FrameType, event: str, _argument: object) -> object:
            if frame.f_code.co_filename != owned_folder.__file__:
                return None
            if event == "line":
                self._paused.release()
                self._may_go[number].acquire()
            return trace

        sys.settrace(trace)
        try:
            self._functions[number]()
        except (AssertionError, OSError) as error:
            self._errors.append(error)
        finally:
            sys.settrace(None)
            self._running.remove(number)
            self._paused.release()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=30))
def test_creators_and_sweepers_do_not_disturb_each_other(
    schedule: list[tuple[int, int]],
) -> None:
    names = itertools.cycle(["00000001", "00000000", "00000001"])

    def own() -> None:
        with OwnedFolder("ray", parent) as folder:
            (folder.path / "mine").touch()
            # Traced, so that the others run meanwhile.
            lock_file = owned_folder._lock_file(folder.path)
            assert lock_file.exists()
            assert os.listdir(folder.path) == ["mine"]

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        parent = Path(name)
        patch.setattr(owned_folder.secrets, "token_hex", lambda _bytes: next(names))
        _abandoned(parent)
        sweep = lambda: remove_abandoned_folders(parent)  # noqa: E731
        _Turns(own, own, sweep, sweep).run(schedule)
        remove_abandoned_folders(parent)
        assert os.listdir(parent) == []
