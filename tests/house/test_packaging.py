"""What a user imports must not drag in what a client has no use for."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "transformers", "redis", "pydantic", "starlette", "numpy")


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("kvrelay", HEAVY),
        ("kvrelay.client", HEAVY),
        ("kvrelay.cli.main", HEAVY),
        ("router.main", ("torch", "ray", "transformers")),
        ("autoscaler.scaling_policy", ("torch", "ray", "transformers")),
        ("prefill_worker.scheduler", ("torch", "ray", "asyncio")),
        ("decode_worker.scheduler", ("torch", "ray", "asyncio")),
        ("router.core.lifecycle", ("torch", "ray", "asyncio", "grpc")),
        ("kv_transfer.lease", ("torch", "ray", "asyncio", "grpc")),
        ("prefill_worker.main", ("ray",)),
        ("decode_worker.main", ("ray",)),
    ],
)
def test_importing_it_leaves_the_rest_alone(module: str, forbidden: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {forbidden!r} if name in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"
