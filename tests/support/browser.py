"""A headless Chromium, where there is one, driven from a thread so that a router on the test's loop
can answer it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
CHROMEDRIVER = Path("/usr/bin/chromedriver")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass
class Browser:
    driver: Any  # selenium.webdriver.Chrome

    async def open(self, url: str) -> None:
        await asyncio.to_thread(self.driver.get, url)

    async def run(self, script: str, *arguments: object) -> Any:
        return await asyncio.to_thread(self.driver.execute_script, script, *arguments)

    async def text(self, selector: str) -> str:
        """Of the first element, as it is shown; empty without one."""
        found: str = await self.run(
            "return document.querySelector(arguments[0])?.innerText ?? ''", selector
        )
        return found

    async def click(self, selector: str) -> None:
        await asyncio.to_thread(lambda: self.driver.find_element("css selector", selector).click())

    async def type(self, selector: str, *keys: str) -> None:
        await asyncio.to_thread(
            lambda: self.driver.find_element("css selector", selector).send_keys(*keys)
        )

    async def until(
        self, selector: str, holds: Callable[[str], bool], seconds: float = 30.0
    ) -> str:
        """The element's text, once `holds` is true of it."""
        text = ""
        try:
            async with asyncio.timeout(seconds):
                while not holds(text := await self.text(selector)):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{selector} still says {text!r}") from None
        return text

    async def errors(self) -> list[str]:
        """What the console has complained of since the last call."""
        log = await asyncio.to_thread(self.driver.get_log, "browser")
        return [one["message"] for one in log if one["level"] in ("SEVERE", "WARNING")]


@asynccontextmanager
async def chromium(profile: Path, width: int = 1280, height: int = 900) -> AsyncIterator[Browser]:
    """Skips the test where there is no Chromium or no selenium."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    for program in (CHROMIUM, CHROMEDRIVER):
        if not program.exists():
            pytest.skip(
                f"{program} is not installed (Debian packages chromium and chromium-driver)"
            )
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for one in (*OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(one)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=str(CHROMEDRIVER))
    driver = await asyncio.to_thread(webdriver.Chrome, options=options, service=service)
    try:
        yield Browser(driver)
    finally:
        await asyncio.to_thread(driver.quit)
