"""Requests on their way to the dispatcher: what they cost, and what is refused before that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from support.router_harness import DEMO, MemoryRegistry, cluster_config

from kvrelay.clock import ManualClock
from kvrelay.engine.sampling.grammar import COMPILER
from kvrelay.errors import DeadlineExceeded
from kvrelay.tenants import ANONYMOUS, Tenant
from kvrelay.types.requests import Guidance
from kvrelay.wire.inference import GenerateRequest, SamplingOptions
from router.core.request import Request
from router.frontend.frontend import ADMISSION_COST, Frontend
from router.frontend.model_card import ModelCard
from router.frontend.rate_limits import Limits
from router.frontend.tokenization import Text
from router.observability.metrics import Metrics
from router.observability.observers import Observers
from router.observability.request_log import RequestLog
from router.runtime.driver import Driver
from router.runtime.loop_slices import SLICE
from router.runtime.stream import Stream


@pytest.fixture
async def frontend() -> AsyncIterator[Frontend]:
    """Without workers: requests wait."""
    config = cluster_config()
    clock = ManualClock(100.0)
    card = ModelCard.load(DEMO, config.model)
    limits = Limits()

    class GivingBack(Observers):
        def ended(self, stream: Stream) -> None:
            super().ended(stream)
            limits.ended(stream)

    observers = GivingBack(Metrics("demo"), RequestLog())
    driver = Driver(config, MemoryRegistry(), "router-0", clock, observers)
    made = Frontend(card, Text.load(DEMO), driver, limits, config.router, clock)
    yield made
    await made.text.close()
    await made.guidance.close()


ASKED = GenerateRequest(token_ids=(11, 12, 13))


async def test_admitted_guidance_says_what_has_tried_it_out(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    admitted: list[Request] = []
    submit = frontend._driver.submit
    monkeypatch.setattr(
        frontend._driver,
        "submit",
        lambda request, text: admitted.append(request) or submit(request, text),
    )
    for guidance in (Guidance("regex", "a", tried_with="by the client"), None):
        asked = replace(ASKED, sampling=SamplingOptions(guidance=guidance))
        frontend.cancel(await frontend.open(asked, ANONYMOUS, 100.0, None))
    tried, free = (one.sampling.guidance for one in admitted)
    assert (tried.tried_with if tried else "", free) == (COMPILER, None)


async def test_a_deadline_that_has_passed_is_told_before_anything_is_done(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tokenized(*_: object) -> tuple[int, ...]:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(Text, "encode", tokenized)
    for time_left in (0.0, -5.0):
        with pytest.raises(DeadlineExceeded, match="send a later deadline"):
            await frontend.open(
                GenerateRequest(prompt="Once upon a time"), ANONYMOUS, 100.0, time_left
            )
    assert frontend._driver.dispatcher.unfinished == 0


async def test_requests_of_one_moment_are_admitted_a_few_in_each_round(frontend: Frontend) -> None:
    """The event loop serves others between them, and another tenant is not behind them all."""
    opened: list[str] = []

    async def ask(tenant: Tenant) -> None:
        await frontend.open(ASKED, tenant, 100.0, 60.0)
        opened.append(tenant.name)

    many = [asyncio.create_task(ask(Tenant("hostile"))) for _ in range(200)]
    most = before = 0
    guest: asyncio.Task[None] | None = None
    while len(opened) < 200:
        await asyncio.sleep(0)
        unfinished = frontend._driver.dispatcher.unfinished
        most, before = max(most, unfinished - before), unfinished
        if guest is None and unfinished > 20:
            guest = asyncio.create_task(ask(Tenant("guest")))
    assert most <= SLICE // ADMISSION_COST
    assert "guest" in opened[:60]
    await asyncio.gather(*many)


async def test_a_client_that_leaves_while_it_is_admitted_leaves_nothing(frontend: Frontend) -> None:
    """At any moment: after its turn, too."""
    for rounds in range(8):
        tasks = [
            asyncio.create_task(
                frontend.open(replace(ASKED, request_id=f"{rounds}-{one}"), ANONYMOUS, 100.0, 60.0)
            )
            for one in range(12)
        ]
        for _ in range(rounds):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        for answer in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(answer, Stream):
                frontend.cancel(answer)
        assert frontend._driver.dispatcher.unfinished == 0


async def test_a_client_that_leaves_while_it_is_admitted_gets_its_tokens_back_once(
    frontend: Frontend,
) -> None:
    tenant = Tenant("acme", tokens_per_minute=1000)
    asked = replace(ASKED, sampling=SamplingOptions(max_tokens=97))
    for number in range(5):
        await frontend.open(replace(asked, request_id=f"held-{number}"), tenant, 100.0, None)
    level = frontend.limits._buckets["acme", "tokens"]._level
    for rounds in range(8):
        tasks = [
            asyncio.create_task(
                frontend.open(replace(asked, request_id=f"{rounds}-{one}"), tenant, 100.0, None)
            )
            for one in range(4)
        ]
        for _ in range(rounds):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        for answer in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(answer, Stream):
                frontend.cancel(answer)
        # The prompts of admitted requests stay charged.
        before, level = level, frontend.limits._buckets["acme", "tokens"]._level
        assert before - 4 * len(ASKED.token_ids or ()) <= level <= before
