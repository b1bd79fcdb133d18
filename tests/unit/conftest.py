from __future__ import annotations

import pytest

from kvrelay.state import redis_connection


@pytest.fixture(autouse=True)
def unhurried_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine Redis, or this process, which may load models, takes seconds to answer. No
    test is about that.
    """
    monkeypatch.setattr(redis_connection, "TIMEOUT_S", 30.0)
