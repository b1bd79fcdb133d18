"""A cluster that serves a model of the hub, which a stand-in provides."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.hub_stand_in import MODEL, HubStandIn

pytestmark = pytest.mark.timeout(300)
DEMO = Path(__file__).parents[2] / "kvrelay" / "models" / "demo"
# What no server reads.
NOTES = "README.md"


def verify(hub: HubStandIn, home: Path) -> subprocess.CompletedProcess[str]:
    """Compares a cluster's answers with transformers'."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [
            *(sys.executable, "-m", "kvrelay.cli.main", "verify"),
            "--model",
            MODEL,
            "--requests",
            "8",
        ],
        env={**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.long
def test_each_file_is_downloaded_once_and_the_cache_serves_without_the_hub(tmp_path: Path) -> None:
    with HubStandIn(DEMO) as hub:
        done = verify(hub, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    files = {one.name for one in DEMO.iterdir() if one.is_file()} - {NOTES}
    assert Counter(hub.downloads) == dict.fromkeys(files, 1)
    done = verify(hub, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
