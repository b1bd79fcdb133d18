"""A phase has one colour, on the status page and in reports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "router" / "observability" / "page" / "style.css"
REPORT = ROOT / "kvrelay" / "loadtest" / "html_report" / "page.css"
PAGE_PHASES = PAGE.with_name("phases.js")
REPORT_PHASES = REPORT.with_name("page.kit.js")


def colours(file: Path, theme: str) -> dict[str, str]:
    """The colours that a style sheet gives its names, by name."""
    light, dark = re.split(r"@media \(prefers-color-scheme: dark\)", file.read_text(), maxsplit=1)
    return dict(re.findall(r"--(\w+): (#\w+)", (light if theme == "light" else dark)))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("phase", ["queue", "prefill", "handoff", "decode", "failed"])
def test_one_colour_for_a_phase(phase: str, theme: str) -> None:
    assert colours(REPORT, theme)[phase] == colours(PAGE, theme)[phase]


def kinds(file: Path, name: str) -> dict[str, str]:
    """The colour of each phase, from an object of a script."""
    found = re.search(rf"const {name} = {{(.*?)}};", file.read_text(), re.DOTALL)
    assert found is not None
    return {key: kind for _, key, kind in re.findall(r'("?)(\w[\w ]*)\1: "(\w+)"', found[1])}


def test_a_phase_is_of_one_kind() -> None:
    page, report = kinds(PAGE_PHASES, "KIND"), kinds(REPORT_PHASES, "PHASE_KIND")
    assert report.pop("client and network") == "send", "only a client knows it"
    assert {phase: report.get(phase, "queue") for phase in page} | {
        "handoff": "handoff",
        "decode": "decode",
    } == page
    assert report.keys() <= page.keys()
