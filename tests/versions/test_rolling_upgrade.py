"""An upgrade and a rollback under load lose no stream and mix no answer:
benchmarks/rolling_upgrade.py, shortened.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mixed_cluster import NoHistory, previous_tree
from rolling_upgrade import upgrade_build, upgrade_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
PAUSE_S = 2.0  # of load between two steps


async def test_of_the_build(tmp_path: Path) -> None:
    try:
        previous = previous_tree(tmp_path / "previous")
    except NoHistory as error:
        pytest.skip(str(error))
    counts = await upgrade_build(previous, tmp_path, PAUSE_S)
    assert counts.ok, counts.json()
    assert counts.resumed + counts.moved, "no stream was under way where something was replaced"


async def test_of_the_model(tmp_path: Path) -> None:
    counts = await upgrade_model(tmp_path, PAUSE_S)
    assert counts.ok, counts.json()
    assert len(counts.versions) == 2, "answers of both versions"
