"""Builds a self-contained HTML page from data, the plot kit, and the scripts that draw."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any


def document(title: str, footer: str, data: dict[str, Any], scripts: Sequence[str]) -> str:
    """Returns a complete HTML document.

    title, footer: plain text. data: JSON values, with the key `runs`, for the scripts. scripts: run
    after the plot kit, in this order.
    """
    # A script element ends at the first "</". Inside JSON strings, "<" may be written as an escape.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "title": html.escape(title),
        "footer": html.escape(footer),
        "style": report_part("page.css"),
        "script": "\n".join([report_part("page.kit.js"), *scripts]),
        "data": text,
    }
    page = report_part("page.html")
    for name, part in parts.items():
        page = page.replace(f"{{{{{name}}}}}", part)
    return page


@cache
def report_part(name: str) -> str:
    """Returns a file of this package."""
    return files("kvrelay.loadtest.html_report").joinpath(name).read_text(encoding="utf-8")
