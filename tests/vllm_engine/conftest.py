"""Tests of workers on vLLM, which `make test-vllm` runs in an environment of their own. They share
the fleet of the fault matrix: a redis-server, a router, 2 prefill and 2 decode workers.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from faults.conftest import fleet, forks
from faults.fleet import ENGINE
from support.vllm_models import Build, build

__all__ = ["fleet", "forks"]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds the model of a family, once."""
    return cache(lambda family: build(family, tmp_path_factory.mktemp(family)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ENGINE == "vllm":
        return
    skip = pytest.mark.skip(reason="needs vLLM; `make test-vllm` runs this")
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(skip)
