"""Options of `kvrelay bench` that name what cannot be measured."""

from __future__ import annotations

import pytest

from kvrelay.cli.main import run


@pytest.mark.parametrize("wrong", ["nvlink", "nccl", "memory", "auto", ""])
def test_a_transport_that_is_not_measured(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "handoff", "--model", "demo", "--transport", wrong]) == 2
    assert capsys.readouterr().err == (
        f"kvrelay: --transport: {wrong!r} is not measured here; allowed are shm, grpc, gloo, nixl\n"
    )
