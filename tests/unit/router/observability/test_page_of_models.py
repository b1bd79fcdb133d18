"""The status page in a browser, over a router of several models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.browser import Browser, chromium
from unit.router.test_several_models import Routers, ask, collect, inference_stub, running

SHOWN = "#overview [aria-pressed=true]"
SMALL = "small ready, prefill 0 of 0, decode 1 of 1"


@pytest.fixture
async def routers(tmp_path: Path) -> AsyncIterator[Routers]:
    async with running(tmp_path) as made:
        yield made


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    async with chromium(tmp_path / "profile") as made:
        yield made


async def test_the_chosen_model_is_in_the_url(routers: Routers, browser: Browser) -> None:
    page = routers.first.http + "/"
    await browser.open(page)
    await browser.until(SHOWN, lambda text: " ".join(text.split()) == SMALL)
    assert await browser.run("return location.search") == ""
    overview = await browser.text("#overview")
    assert "large ready" in " ".join(overview.split())
    assert "idle asleep" in " ".join(overview.split())
    await browser.run("document.querySelectorAll('#overview button')[1].click()")
    await browser.until(SHOWN, lambda text: text.startswith("large"))
    assert await browser.run("return location.search") == "?model=large"
    await browser.open(await browser.run("return location.href"))
    await browser.until(SHOWN, lambda text: text.startswith("large"))
    assert await browser.run("return document.getElementById('models').value") == "large"
    # A link to a model that is gone shows the first one.
    await browser.open(page + "?model=gone")
    await browser.until(SHOWN, lambda text: text.startswith("small"))
    assert await browser.run("return location.search") == ""


async def test_workers_have_the_names_within_their_model(
    routers: Routers, browser: Browser
) -> None:
    async with inference_stub(routers.first.grpc) as stub:
        await collect(stub, ask("large"))
    await browser.open(routers.first.http + "/?model=large")
    await browser.until(".pool.decode .id", lambda text: text == "decode-0")
    await browser.until("#gantt .attempt", lambda text: text == "decode-0")
    title = "return document.querySelector('.pool.decode tbody th').title"
    assert (await browser.run(title)).startswith("large.decode-0: ")
    await browser.click("#gantt button")
    await browser.until("#detail .route", lambda text: "large.decode-0" in text)
