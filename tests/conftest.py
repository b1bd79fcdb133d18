from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine must not fail a property: nothing here is about seconds.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


WITH_ONE_CLUSTER = {"cluster", "faults"}  # folders whose tests share what takes seconds to start


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What one process runs where there are several: a file, or such a folder."""
    for item in items:
        folder = item.path.parent
        group = folder if folder.name in WITH_ONE_CLUSTER else item.path
        item.add_marker(pytest.mark.xdist_group(str(group.relative_to(item.config.rootpath))))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_model(architecture="llama") -> folder of a tiny random model (see tiny_models.py), built once a session."""
    from tiny_models import build

    folders: dict[str, Path] = {}

    def folder(architecture: str = "llama") -> Path:
        if architecture not in folders:
            folders[architecture] = build(architecture, tmp_path_factory.mktemp(architecture))
        return folders[architecture]

    return folder
