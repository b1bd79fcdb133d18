"""A phase has one colour, on the status page and in reports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "router" / "observability" / "page" / "style.css"
REPORT = ROOT / "kvrelay" / "loadtest" / "html_report" / "page.css"


def colours(file: Path, theme: str) -> dict[str, str]:
    """The colours that a style sheet gives its names, by name."""
    light, dark = re.split(r"@media \(prefers-color-scheme: dark\)", file.read_text(), maxsplit=1)
    return dict(re.findall(r"--(\w+): (#\w+)", (light if theme == "light" else dark)))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("phase", ["queue", "prefill", "handoff", "decode"])
def test_one_colour_for_a_phase(phase: str, theme: str) -> None:
    assert colours(REPORT, theme)[phase] == colours(PAGE, theme)[phase]
