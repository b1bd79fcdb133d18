from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.launch import ray_folder
from kvrelay.launch.ray_folder import RayFolder, remove_abandoned_folders
from kvrelay.process.child import family

_OWNER = """
import sys
from pathlib import Path
from kvrelay.launch import ray_folder
ray_folder.PARENT = Path(sys.argv[1])
with ray_folder.RayFolder() as folder:
    print(folder.path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ray_folder, "PARENT", tmp_path)
    return tmp_path


def test_a_folder_lasts_as_long_as_it_is_needed(parent: Path) -> None:
    with RayFolder() as folder:
        assert Path(folder.path).parent == parent
        (Path(folder.path) / "session").mkdir()
    assert list(parent.iterdir()) == []


def test_only_folders_of_those_who_were_killed_are_taken_away(parent: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    path = Path(owner.stdout.readline().strip())
    (parent / "kvrelay-ray-of-somebody-else").mkdir()
    remove_abandoned_folders()
    assert path.is_dir(), "its owner lives"
    owner.kill()
    owner.communicate()
    assert path.is_dir()
    with RayFolder():
        assert not path.exists()
    assert [one.name for one in parent.iterdir()] == ["kvrelay-ray-of-somebody-else"]


def test_a_family_is_a_process_and_all_below_it() -> None:
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    top = subprocess.Popen([sys.executable, "-c", f"{nested}"], stdin=subprocess.PIPE, text=True)
    try:
        while len(found := family(top.pid)) < 2:
            assert top.poll() is None
        assert found[0] == top.pid
    finally:
        top.communicate("\n")
    assert family(top.pid) == [top.pid]


def test_a_thread_that_ends_meanwhile_hides_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    listed = Path.iterdir

    def with_one_that_is_gone(folder: Path) -> list[Path]:
        return [folder / "999999999", *listed(folder)]

    monkeypatch.setattr(Path, "iterdir", with_one_that_is_gone)
    try:
        assert child.pid in family(os.getpid())
    finally:
        child.communicate("\n")
