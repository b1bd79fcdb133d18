"""Workers whose tiers always win against computing."""

from __future__ import annotations

import pytest

from kvrelay.worker.tiers.tier_cost import TierCost


def read_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are read from a tier whatever that costs: a toy computes sooner than any file is
    opened.
    """
    monkeypatch.setattr(TierCost, "is_read_faster", lambda _, tokens, *__: bool(tokens))
