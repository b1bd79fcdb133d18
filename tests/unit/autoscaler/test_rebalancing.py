from __future__ import annotations

import pytest

from autoscaler.rebalancing import number_of


@pytest.mark.parametrize(
    ("name", "number"),
    [("decode-12", 12), ("decode", 0), ("my-worker", 0), ("7", 7), ("decode-²", 0), ("decode-", 0)],
)
def test_a_worker_may_have_any_name(name: str, number: int) -> None:
    """It comes from the registry."""
    assert number_of(name) == number
