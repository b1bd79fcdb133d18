"""Adapters that come and go while several tenants send requests: no request fails, and each answer
has the tokens of its own adapter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_loading import UNLOADED, Report, run

pytestmark = [pytest.mark.timeout(600)]

# What the first requests and steps of each shape take.
WARM_UP = 96 * 2**20


def check(found: Report, adapters: int, rounds: int) -> None:
    """Raises unless all requests were answered, and each adapter was asked: when it was loaded, and
    while it was unloaded.
    """
    load = found.load
    assert not load.failures
    names = {f"lora-{number}" for number in range(adapters)}
    assert load.by_model.keys() == {"", *names}
    assert all(load.by_model[name] >= 2 * rounds for name in names)
    assert len(found.operator.unloaded) == rounds * adapters
    for name, growth in found.growth().items():
        assert max(growth) < WARM_UP + 3 * found.adapter_bytes, name


@pytest.mark.long
async def test_adapters_come_and_go_under_load(tmp_path: Path) -> None:
    adapters = 2 * UNLOADED
    check(await run(tmp_path, adapters=adapters, answers=30), adapters, 1)


@pytest.mark.long
async def test_fifty_adapters_come_and_go_under_load(tmp_path: Path) -> None:
    found = await run(tmp_path, adapters=50, answers=60, rounds=2)
    check(found, 50, 2)
    for name, (first, second) in found.growth().items():
        # The memory of adapters that are gone is used for those that come.
        assert second < first + found.adapter_bytes / 2, name
