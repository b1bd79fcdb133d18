"""The folders of the source stay small enough to be read as a list."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.source import PACKAGES, ROOT

MOST_MODULES = 20


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_has_many_modules(package: str) -> None:
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}
    sizes = {folder: len(_modules(folder)) for folder in folders}
    assert not {str(one): size for one, size in sizes.items() if size > MOST_MODULES}


def _modules(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.glob("*.py")
        if path.name != "__init__.py" and not path.stem.endswith(("_pb2", "_pb2_grpc"))
    ]
