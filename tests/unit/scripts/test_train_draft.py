"""A trained draft model fits the bundled model."""

from __future__ import annotations

from pathlib import Path

import pytest
import train_demo
import train_draft

from kvrelay.config.schema import ClusterConfig
from kvrelay.worker.runtime.draft_files import check_draft_files


def test_a_trained_draft_model_is_accepted_for_the_demo_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_demo, "BATCH_TOKENS", 128)
    monkeypatch.setattr(train_demo, "POOL_DOCUMENTS", 16)
    parameters = train_draft.run(tmp_path, layers=1, hidden=64, steps=1, seed=0)
    assert parameters < 400_000
    speculation = {"kind": "draft", "model": str(tmp_path)}
    config = ClusterConfig.model_validate({"decode": {"speculation": speculation}})
    found = check_draft_files(config, "demo")
    assert found is not None
    assert found.weight_bytes >= 2 * parameters
