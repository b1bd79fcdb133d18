"""MkDocs hook: adds documents from outside docs/ to the site and maps links between the two.

Links in the repository are relative file paths, so that they work on a code host. On the site, a
link to a document that has a page leads to that page. A link to any other file of the repository
becomes code text, because the site does not contain that file. Images lie below docs/.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = PurePosixPath("docs")

# Document of the repository -> page below docs/.
PAGES = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks/figures.md",
    "CHANGELOG.md": "contributing/changelog.md",
    "CONTRIBUTING.md": "contributing/index.md",
    "SECURITY.md": "reference/security-policy.md",
    "examples/README.md": "guides/examples.md",
    "k8s/README.md": "guides/kubernetes-manifests.md",
}
SOURCES = {page: document for document, page in PAGES.items()}

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]\[]+)\]\((?P<target>[^()\s]+)\)")
_FENCE = re.compile(r"^(?:```|~~~)", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each document in PAGES."""
    from mkdocs.structure.files import File

    for document, page in PAGES.items():
        text = (ROOT / document).read_text()
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Maps the links of one page."""
    path = page.file.src_uri
    return map_links(markdown, SOURCES.get(path, str(DOCS / path)), path)


def map_links(markdown: str, document: str, page: str) -> str:
    """Returns `markdown` with links for the site.

    `document` is the path of the source in the repository, `page` the path below docs/.
    """

    def replaced(match: re.Match[str]) -> str:
        text, link = match["text"], match["target"]
        if re.match(r"[a-z][a-z0-9+.-]*:|#", link):
            return match[0]
        target, hash_mark, anchor = link.partition("#")
        path = os.path.normpath(PurePosixPath(document).parent / target)
        found = page_of(path)
        if match["image"]:
            found = str(PurePosixPath(path).relative_to(DOCS))
        if found is None:
            return text if text.startswith("`") else f"{text} (`{path}`)"
        relative = os.path.relpath(found, PurePosixPath(page).parent)
        return f"{match['image']}[{text}]({relative}{hash_mark}{anchor})"

    return "".join(
        part if is_code else _LINK.sub(replaced, part) for is_code, part in parts_of(markdown)
    )


def page_of(path: str) -> str | None:
    """Returns the page below docs/ for a path in the repository; None if there is no page."""
    if path in PAGES:
        return PAGES[path]
    if PurePosixPath(path).is_relative_to(DOCS) and path.endswith(".md"):
        return str(PurePosixPath(path).relative_to(DOCS))
    return None


def parts_of(markdown: str) -> list[tuple[bool, str]]:
    """Yields (is fenced code, text) pairs that together are `markdown`."""
    parts: list[tuple[bool, str]] = []
    lines: list[str] = []
    is_code = False
    for line in markdown.splitlines(keepends=True):
        if not _FENCE.match(line.lstrip()):
            lines.append(line)
            continue
        if is_code:
            lines.append(line)
            parts.append((True, "".join(lines)))
            lines = []
        else:
            parts.append((False, "".join(lines)))
            lines = [line]
        is_code = not is_code
    parts.append((is_code, "".join(lines)))
    return parts
