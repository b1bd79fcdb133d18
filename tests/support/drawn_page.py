"""A page of one file as a headless Chromium draws it.

The page posts what a probe in it found to a server of the test, so that nothing depends on how soon
the browser is done: on a busy machine `--dump-dom` may print a page before its scripts have run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
)
DEADLINE_S = 120.0
PROBE = """<script>
addEventListener("error", (event) => { window.failed = event.message; });
const boxes = (svg) => [...svg.querySelectorAll("text")].map((one) => [one.textContent,
  one.getBoundingClientRect()]);
const meet = ([, a], [, b]) => a.left < b.right && b.left < a.right && a.top < b.bottom - 2
  && b.top < a.bottom - 2;
addEventListener("load", () => setTimeout(() => {
  const root = document.documentElement;
  const found = { failed: window.failed ?? null, title: document.title,
    plots: document.querySelectorAll("svg").length,
    lanes: [...document.querySelectorAll("svg[aria-label^='Load, '] .strong")]
      .map((one) => one.textContent),
    cut: [...document.querySelectorAll(".stacked td")]
      .filter((one) => one.scrollWidth > one.clientWidth + 1
        || one.getBoundingClientRect().right > innerWidth).length,
    dots: [...document.querySelectorAll("svg")].map((svg) =>
      [...svg.querySelectorAll("circle")].map((one) => one.getAttribute("fill"))),
    marks: [...document.querySelectorAll("svg")].map((svg) => boxes(svg).map(([text]) => text)),
    hidden: [...document.querySelectorAll(".scroll")]
      .filter((one) => one.scrollWidth > one.clientWidth + 1)
      .map((one) => one.closest(".card").querySelector("h3").textContent),
    overlaps: [...document.querySelectorAll("svg")].flatMap((svg) => boxes(svg)
      .flatMap((one, index, all) => all.slice(index + 1).filter((other) => meet(one, other))
        .map((other) => `${svg.ariaLabel}: ${one[0]}, ${other[0]}`))),
    banners: [...document.querySelectorAll(".banner")].map((one) => one.textContent),
    bars: document.querySelectorAll("svg rect").length, wide: root.scrollWidth - root.clientWidth,
    text: document.body.innerText };
  parent.postMessage(found, "*");
}, 300));
</script>"""
FRAME = """<!doctype html><body><iframe style="border:0;width:{width}px;height:3000px"
 srcdoc="{document}"></iframe>
<script>
addEventListener("message", (event) =>
  fetch("/found", {{ method: "POST", body: JSON.stringify(event.data) }}));
</script>"""


def drawn_page(document: str, profile: Path, width: int = 1280) -> dict[str, Any]:
    """What the probe found in `document`, drawn `width` pixels wide; skips without a Chromium.

    Args:
        profile: A folder for the browser's profile.
    """
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    framed = (
        document.replace("<head>", f"<head>{PROBE}", 1).replace("&", "&amp;").replace('"', "&quot;")
    )
    found: SimpleQueue[dict[str, Any]] = SimpleQueue()
    with serving(FRAME.format(width=width, document=framed).encode(), found) as url:
        browser = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return found.get(timeout=DEADLINE_S)
        except Empty:
            raise AssertionError(f"the page was not drawn within {DEADLINE_S:.0f} s") from None
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()


@contextmanager
def serving(page: bytes, found: SimpleQueue[dict[str, Any]]) -> Iterator[str]:
    """The URL of a server that answers with `page` and puts what is posted into `found`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(page)

        def do_POST(self) -> None:
            found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a test's output is for its failures."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
