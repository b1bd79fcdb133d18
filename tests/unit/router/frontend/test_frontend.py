"""What is refused before a request costs anything."""

from __future__ import annotations

import pytest
from support.router_harness import DEMO, MemoryRegistry, cluster_config

from kvrelay.clock import ManualClock
from kvrelay.errors import DeadlineExceeded
from kvrelay.tenants import ANONYMOUS
from kvrelay.wire.inference import GenerateRequest
from router.frontend.frontend import Frontend
from router.frontend.model_card import ModelCard
from router.frontend.rate_limits import Limits
from router.frontend.tokenization import Text
from router.observability.metrics import Metrics
from router.observability.observers import Observers
from router.observability.request_log import RequestLog
from router.runtime.driver import Driver


async def test_a_deadline_that_has_passed_is_told_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = cluster_config()
    clock = ManualClock(100.0)
    card = ModelCard.load(DEMO, config.model)
    driver = Driver(
        config, MemoryRegistry(), "router-0", clock, Observers(Metrics("demo"), RequestLog())
    )

    async def tokenized(*_: object) -> tuple[int, ...]:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(Text, "encode", tokenized)
    frontend = Frontend(card, Text.load(DEMO), driver, Limits(), config.router, clock)
    for time_left in (0.0, -5.0):
        with pytest.raises(DeadlineExceeded, match="send a later deadline"):
            await frontend.open(
                GenerateRequest(prompt="Once upon a time"), ANONYMOUS, 100.0, time_left
            )
    assert driver.dispatcher.unfinished == 0
