"""The status page in a browser, over a real router whose workers do what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from support.browser import Browser, chromium
from support.fake_worker import worker_info
from support.router_harness import RouterHarness, running_router
from support.tokens import Tokens


@pytest.fixture
async def cluster() -> AsyncIterator[RouterHarness]:
    async with running_router(prefill=2, decode=2) as running:
        yield running


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    async with chromium(tmp_path) as running:
        yield running


async def test_a_visit(cluster: RouterHarness, browser: Browser) -> None:
    """One visit, from the first look to the router's end: a browser takes seconds to start."""
    cluster.registry.entries["<img src=x onerror=alert(1)>"] = worker_info(
        "<img src=x onerror=alert(1)>", "decode"
    )
    await browser.open(cluster.http + "/")
    await browser.until("#state-word", lambda text: text == "ready")
    await browser.until(".pool.decode tbody", lambda text: "<img src=x onerror=alert(1)>" in text)
    assert "prefill-1" in await browser.text(".pool.prefill tbody")
    del cluster.registry.entries["<img src=x onerror=alert(1)>"]

    # A prompt, its tokens and its ledger
    await browser.run(
        "document.getElementById('prompt').value = '<b>once</b> upon a time there "
        "was a long prompt'"
    )
    await browser.run("document.getElementById('max-tokens').value = 32")
    await browser.click("#send")
    ledger = await browser.until("#answer-ledger", lambda text: "end to end" in text)
    assert "prefill-" in ledger
    assert "decode-" in ledger
    assert "64 B over fake" in ledger
    assert await browser.run("return document.querySelectorAll('#answer .token').length") > 1
    assert await browser.run("return document.querySelectorAll('#gap-bars span').length") > 0
    assert "tokens/s" in await browser.text("#gap-text")

    # Stop cancels
    for name in ("decode-0", "decode-1"):
        cluster.workers[name].pace_s = 0.02
    await browser.run("document.getElementById('max-tokens').value = 4000")
    await browser.click("#send")
    async with asyncio.timeout(60):
        while await browser.run("return document.querySelectorAll('#answer .token').length") < 5:
            await asyncio.sleep(0.02)
    await browser.click("#stop")
    await browser.until("#answer .note", lambda text: text == "stopped")
    async with asyncio.timeout(60):
        while any(one.worker.sequences or one.worker.prompts for one in cluster.workers.values()):
            await asyncio.sleep(0.01)
    await browser.until("#gantt button .total", lambda text: text == "stopped")
    assert await browser.run("return document.querySelectorAll('#gantt button').length") == 2

    # A row's ledger, by the keyboard
    await browser.run("document.querySelector('#gantt button').focus()")
    await browser.type("#gantt button", "\ue015", "\ue007")  # arrow down, enter
    await browser.until("#detail", lambda text: "end to end" in text)
    await browser.type("#detail .close", "\ue00c")  # escape
    assert not await browser.run("return document.getElementById('detail').open")
    assert (
        await browser.run("return document.querySelectorAll('img[src=x], #answer b').length") == 0
    )
    assert await browser.errors() == []

    # The registry goes and comes back; the router ends
    cluster.registry.away = True
    await browser.until(
        "#state", lambda text: "registry unreachable" in text and "Redis at memory: away" in text
    )
    cluster.registry.away = False
    await browser.until("#state-word", lambda text: text == "ready")
    cluster.stop()
    cluster.stop()
    await browser.until("#state-word", lambda text: text == "router unreachable")
    assert "last answer at" in await browser.text("#state-text")
    assert await browser.run("return document.getElementById('send').disabled")


@pytest.mark.parametrize("width", [390, 1280])
async def test_nothing_is_wider_than_the_window(
    tmp_path: Path, cluster: RouterHarness, width: int
) -> None:
    cluster.registry.entries["decode-44"] = worker_info("decode-44", "decode")
    async with chromium(tmp_path, width) as browser:
        await asyncio.to_thread(
            browser.driver.execute_cdp_cmd,
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        await browser.open(cluster.http + "/")
        await browser.until("#state-word", lambda text: text == "ready")
        assert await browser.run("return innerWidth") == width
        assert (
            await browser.run(
                "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            == 0
        )
        await browser.until(".pool.decode tbody", lambda text: "decode-44" in text)
        assert (
            await browser.run(
                "return [...document.querySelectorAll('.pool tbody th')]"
                ".filter((one) => one.scrollWidth > one.clientWidth)"
                ".map((one) => one.textContent)"
            )
            == []
        )


async def test_a_token_is_asked_for_and_kept_in_the_tab_alone(
    browser: Browser, tmp_path: Path
) -> None:
    tokens = Tokens(tmp_path / "tokens.yaml")
    token = tokens.add("acme")
    async with running_router(tokens_file=tokens.path) as cluster:
        await browser.open(cluster.http + "/")
        await browser.until(
            "#token-dialog[open] h2", lambda text: text == "This cluster requires a token"
        )
        assert await browser.text("#state-word") == "no token"
        await browser.type("#token", "kvr_wrong", "\ue007")
        await browser.until("#token-why", lambda text: "unknown or was revoked" in text)
        assert await browser.run("return document.getElementById('token').value") == ""
        await browser.type("#token", token, "\ue007")
        await browser.until("#state-word", lambda text: text == "ready")
        await browser.run("document.getElementById('max-tokens').value = 8")
        await browser.click("#send")
        await browser.until("#answer-ledger", lambda text: "end to end" in text)
        await browser.until("#gantt button .who", lambda text: text == "yours")
        assert await browser.run("return [localStorage.length, document.cookie, "
                                 "location.href]") == [
            0, "", cluster.http + "/",
        ]  # fmt: skip
        assert await browser.run("return Object.values(sessionStorage)") == [token]
        await browser.open(cluster.http + "/")  # again, in the same tab
        await browser.until("#state-word", lambda text: text == "ready")
        complaints = [one for one in await browser.errors() if "401" not in one]
        assert complaints == []


async def complete(cluster: RouterHarness, max_tokens: int) -> None:
    body = {"model": "demo", "prompt": "once upon a time " * 9, "max_tokens": max_tokens}
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as client:
        assert (await client.post("/v1/completions", json=body)).status_code == 200


PRESSED = "return document.querySelector('#align [aria-pressed=true]').textContent"
# The last label of the axis.
AXIS_END = "#axis span:last-child"


def milliseconds(text: str) -> float:
    """Of a time as the page shows it, such as 250 ms or 1.2 s."""
    number, unit = text.split()
    return float(number) * {"ms": 1, "s": 1000}[unit]


async def test_the_axis_fits_the_rows_in_view(cluster: RouterHarness, browser: Browser) -> None:
    for name in ("decode-0", "decode-1"):
        cluster.workers[name].pace_s = 0.01
    await complete(cluster, 300)
    for _ in range(10):
        await asyncio.gather(*(complete(cluster, 8) for _ in range(4)))
    await browser.open(cluster.http + "/")
    # No click: the page opens on this tab and stays on it.
    assert await browser.run(PRESSED) == "from arrival"
    await browser.until("#state-word", lambda text: text == "ready")
    end = milliseconds(await browser.until(AXIS_END, lambda text: bool(text)))
    assert end < 300 * 10, "the long request is out of view"
    assert await browser.run(PRESSED) == "from arrival"
    # The long request is cut, so that the others stay readable. On a busy machine, some others are
    # as long as the axis, too, which fits nine tenths of the rows in view.
    # Rows may come after the page was scrolled.
    scroll = "document.getElementById('gantt').scrollTop = 1e6;"
    async with asyncio.timeout(30):
        while not await browser.run(
            scroll + "return document.querySelector('li:last-child > * > .cut')"
        ):
            await asyncio.sleep(0.05)
    cut, rows = await browser.run(
        "return ['#gantt .cut', '#gantt .bars'].map((one) => document.querySelectorAll(one).length)"
    )
    assert 1 <= cut < rows / 2
    assert milliseconds(await browser.text(AXIS_END)) < 300 * 10
    assert "longer than the axis" in await browser.text("#legend")

    # The time axis of an idle cluster ends near the last request, and says when that was.
    await browser.click("[data-align=clock]")
    await browser.until(AXIS_END, lambda text: text.endswith(" s ago"))
    await browser.run("document.getElementById('gantt').scrollTop = 0")
    assert await browser.run(
        "const row = document.querySelector('#gantt .bars').getBoundingClientRect();"
        "const bar = document.querySelector('#gantt .bar.decode').getBoundingClientRect();"
        "return bar.right > row.left && bar.left < row.right"
    )


async def test_an_axis_of_few_rows_fits_all(cluster: RouterHarness, browser: Browser) -> None:
    for name in ("decode-0", "decode-1"):
        cluster.workers[name].pace_s = 0.01
    await complete(cluster, 300)
    await complete(cluster, 8)
    await browser.open(cluster.http + "/")
    await browser.until(AXIS_END, lambda text: bool(text) and milliseconds(text) >= 300 * 10)
    assert await browser.run("return document.querySelectorAll('#gantt .cut').length") == 0


async def test_an_open_ledger_follows_its_request(cluster: RouterHarness, browser: Browser) -> None:
    for one in cluster.workers.values():
        one.may_step.clear()
    request = asyncio.create_task(complete(cluster, 8))
    await browser.open(cluster.http + "/")
    await browser.until("#gantt button .total", lambda text: text == "prefilling")
    await browser.click("#gantt button")
    await browser.until("#detail p", lambda text: "answer 0 of at most 8; prefilling" in text)
    for one in cluster.workers.values():
        one.may_step.set()
    await request
    await browser.until("#detail p", lambda text: "answer 8 of at most 8; length" in text)
    assert "first token" in await browser.text("#detail .sum")
    assert await browser.run("return document.activeElement.className") == "close"


async def test_a_failed_over_request_names_the_lost_worker(
    cluster: RouterHarness, browser: Browser
) -> None:
    for name in ("decode-0", "decode-1"):
        cluster.workers[name].pace_s = 0.02
    request = asyncio.create_task(complete(cluster, 40))
    async with asyncio.timeout(60):
        while not (held := [name for name, one in cluster.workers.items() if one.worker.sequences]):
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    await cluster.kill(held[0])
    await request
    await browser.open(cluster.http + "/")
    await browser.until("#gantt .attempt.failed .lost", lambda text: text == held[0])
    assert await browser.run("return document.querySelectorAll('#gantt .attempt').length") == 2
    assert await browser.run("return document.querySelectorAll('#gantt .bar.failed').length") == 1
    await browser.click("#gantt button")
    await browser.until("#detail .attempts", lambda text: f"{held[0]} was lost" in text)
    assert await browser.run("return document.querySelectorAll('.attempts .failed').length") == 1
