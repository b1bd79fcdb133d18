"""Documents: relative links lead somewhere, README.md is short, and prose is wrapped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_site import map_links, parts_of

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 100
README_LINES = 150
PATTERNS = (
    *("*.md", "docs/**/*.md", "k8s/**/*.md", "tests/faults/README.md"),
    *("benchmarks/README.md", "examples/README.md"),
)
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for one in PATTERNS for path in ROOT.glob(one))
GENERATED = {"docs/models.md"}
LINK = re.compile(r"\]\((?P<target>[^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} (?P<text>.+)$", re.MULTILINE)


def prose_of(markdown: str) -> str:
    """The text without fenced code, with line numbers kept."""
    return "".join(
        "\n" * part.count("\n") if is_code else part for is_code, part in parts_of(markdown)
    )


def anchors_of(markdown: str) -> set[str]:
    """The anchors of a document's headings, as MkDocs and code hosts make them."""
    texts = (match["text"] for match in HEADING.finditer(prose_of(markdown)))
    return {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text.replace("`", "")).strip().lower())
        for text in texts
    }


def broken_links(document: str, markdown: str) -> Iterator[str]:
    """The relative links of a document that lead to no file, or to no heading of one."""
    for match in LINK.finditer(prose_of(markdown)):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path = (ROOT / document).parent / target if target else ROOT / document
        is_document = path.is_file() and path.suffix == ".md"
        known = anchors_of(path.read_text()) if is_document else set()
        if not path.exists() or (anchor and is_document and anchor not in known):
            yield match["target"]


def long_lines(markdown: str) -> Iterator[int]:
    """Numbers of prose lines above WIDTH columns; tables, links and code may be longer."""
    for number, line in enumerate(prose_of(markdown).splitlines(), 1):
        is_table = line.lstrip().startswith("|")
        longest = max(map(len, re.findall(r"\S*\]\([^()]*\)\S*", line)), default=0)
        if len(line) > WIDTH and not is_table and longest < WIDTH - 40:
            yield number


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_lead_somewhere(document: str) -> None:
    assert not list(broken_links(document, (ROOT / document).read_text()))


@pytest.mark.parametrize("document", sorted(set(DOCUMENTS) - GENERATED))
def test_prose_is_wrapped(document: str) -> None:
    assert not list(long_lines((ROOT / document).read_text()))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_broken_links_and_long_lines_are_found() -> None:
    text = "[z](no/such.md) [w](https://example.org)\n```\n[q](none)\n```\n"
    assert list(broken_links("README.md", "[y](#no-such-heading)")) == ["#no-such-heading"]
    assert anchors_of("# A `b` c\n## D, e\n") == {"a-b-c", "d-e"}
    assert list(broken_links("README.md", text)) == ["no/such.md"]
    assert list(long_lines(f"short\n{'word ' * 30}\n| {'cell ' * 30} |\n")) == [2]


def test_links_are_mapped_to_pages_of_the_site() -> None:
    links = "[a](../../SECURITY.md#x) [b](../versions.md) [c](../../kvrelay/errors.py)\n"
    image = map_links("![a](docs/status-page.webp)", "README.md", "index.md")
    assert image == "![a](status-page.webp)"
    text = f"{links}```\n[d](e)\n```\n"
    assert map_links(text, "docs/guides/security.md", "guides/security.md") == (
        "[a](../reference/security-policy.md#x) [b](../versions.md) c (`kvrelay/errors.py`)\n"
        "```\n[d](e)\n```\n"
    )
