"""An open file is at its path, or has been removed, replaced or hidden."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrelay.open_path import is_open_at


def removed(file: Path) -> None:
    file.unlink()


def replaced(file: Path) -> None:
    other = file.with_name("other")
    other.touch()
    other.rename(file)


def linked(file: Path) -> None:
    moved = file.with_name("moved")
    file.rename(moved)
    file.symlink_to(moved)


def folder_removed(file: Path) -> None:
    file.parent.rename(file.parent.with_name("away"))


def folder_is_a_file(file: Path) -> None:
    folder_removed(file)
    file.parent.touch()


def folder_is_a_loop(file: Path) -> None:
    folder_removed(file)
    file.parent.symlink_to(file.parent.name)


CHANGES = (removed, replaced, linked, folder_removed, folder_is_a_file, folder_is_a_loop)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_is_there_now(tmp_path: Path, change: Callable[[Path], None]) -> None:
    file = tmp_path / "folder" / "lock"
    file.parent.mkdir()
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
    assert is_open_at(descriptor, file)
    change(file)
    assert not is_open_at(descriptor, file)
    os.close(descriptor)
