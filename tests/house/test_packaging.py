"""What a user imports must not drag in what a client has no use for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "transformers", "redis", "pydantic", "starlette", "numpy")


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        ("kvrelay, kvrelay.client, kvrelay.cli.main", HEAVY),
        ("router.main, autoscaler.scaling_policy", ("torch", "ray", "transformers")),
        ("prefill_worker.scheduler, decode_worker.scheduler", ("torch", "ray", "asyncio")),
        ("router.core.lifecycle, kv_transfer.lease", ("torch", "ray", "asyncio", "grpc")),
        ("prefill_worker.main, decode_worker.main", ("ray",)),
    ],
)
def test_importing_them_leaves_the_rest_alone(modules: str, forbidden: tuple[str, ...]) -> None:
    code = f"import sys, {modules}; print([name for name in {forbidden!r} if name in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


def test_make_docs_ends_with_how_to_read_the_site() -> None:
    """The folder that it serves is the one that mkdocs writes."""
    steps = subprocess.run(
        ["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text().split("markdown_extensions")[0])
    assert f"http.server -d {site['site_dir']} -b 127.0.0.1 8080" in steps
