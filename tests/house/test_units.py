"""Units of bytes: KiB, MiB and GiB for memory, files and messages. Decimal units are for rates, and
for what is compared with a data sheet.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from docs_site import parts_of
from support.source import PACKAGES, ROOT

# Where decimal sizes stand beside data sheets, or beside what other programs print.
DECIMAL = ("kvrelay/planning", "kvrelay/cli/plan", "kvrelay/bench", "kvrelay/config/size.py")
DECIMAL_PAGES = ("docs/guides/planning.md", "docs/guides/docker-compose.md", "docs/benchmarks")
SOURCES = sorted(
    str(path.relative_to(ROOT))
    for package in PACKAGES
    for kind in ("py", "js", "html")
    for path in (ROOT / package).rglob(f"*.{kind}")
    if "_pb2" not in path.name
)
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("README.md", "docs/**/*.md", "examples/*.md", "k8s/**/*.md")
    for path in ROOT.glob(pattern)
)
# Of no rate, and of no option such as --memory 80GB of `kvrelay plan`.
SIZE = re.compile(r"(?<![A-Za-z_-])(?:[kKMG]B)(?!/s|\w)")
# No unit has this name: a kB has 1,000 bytes, a KiB 1,024.
WRONG = re.compile(r"(?<![\w`])\d[\d.,]* ?(?:KB|kb|Kb|Mb|mb|Gb|gb|kib|mib|gib|Kib|Mib|Gib)\b")
BINARY_NUMBER = re.compile(r"2 ?\*\* ?[1234]0|>> ?[1234]0|\b1024\b|_[KMG]IB\b")
DECIMAL_NUMBER = re.compile(r"\b1e[369]\b|10 ?\*\* ?[369]\b")


def mixed(text: str) -> Iterator[int]:
    """Numbers of lines that name a unit and divide by the other kind of number."""
    for number, line in enumerate(text.splitlines(), 1):
        is_binary = bool(re.search(r"[KMG]iB\b", line))
        is_decimal = bool(re.search(r"(?<![A-Za-z])[kKMG]B\b", line))
        if (is_decimal and not is_binary and BINARY_NUMBER.search(line)) or (
            is_binary and not is_decimal and DECIMAL_NUMBER.search(line)
        ):
            yield number


def said(path: str, text: str) -> str:
    """What a file may show: strings and comments of Python, everything of other files."""
    if not path.endswith(".py"):
        return text
    kinds = {tokenize.STRING, tokenize.COMMENT}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(one.string for one in tokens if one.type in kinds)


@pytest.mark.parametrize("path", SOURCES)
def test_the_source_has_one_kind_of_units(path: str) -> None:
    text = (ROOT / path).read_text()
    assert not list(mixed(text)), "a number of one kind has a unit of the other"
    assert not WRONG.findall(said(path, text))
    if not path.startswith(DECIMAL):
        assert not SIZE.findall(said(path, text)), "sizes have KiB, MiB or GiB"


@pytest.mark.parametrize("path", PAGES)
def test_the_documents_have_one_kind_of_units(path: str) -> None:
    prose = "".join(part for is_code, part in parts_of((ROOT / path).read_text()) if not is_code)
    # Names of options are code, and the vocabulary explains both kinds.
    prose = re.sub(r"`[^`]*`|^\| kB, .*$", "", prose, flags=re.MULTILINE)
    assert not WRONG.findall(prose)
    if path == "docs/reference/cli.md":
        # Options of `kvrelay plan`.
        prose = re.sub(r"such as \S+", "", prose)
    if not path.startswith(DECIMAL_PAGES):
        assert not SIZE.findall(prose), "sizes have KiB, MiB or GiB"


@pytest.mark.parametrize(
    "line",
    [
        'f"{num_bytes / 2**30:.3g} GB"',
        'f"{num_bytes >> 20} MB"',
        'f"{num_bytes / 1024:.1f} KB"',
        'f"{num_bytes / 1e6:.1f} MiB"',
    ],
)
def test_a_unit_of_the_other_kind_is_found(line: str) -> None:
    assert list(mixed(line)) == [1]


def test_a_unit_that_does_not_exist_is_found() -> None:
    assert len(WRONG.findall("5 KB, 7Mb and 9 gb, but 3 kB and 4 MiB")) == 3
    assert SIZE.findall("1.5 GB, 12.6 GB/s, 4 MiB") == ["GB"]
