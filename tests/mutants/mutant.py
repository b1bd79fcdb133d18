"""A safeguard taken out: one replacement in one file, and the tests that must fail then."""

from __future__ import annotations

import ast
import functools
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class DoesNotApply(Exception):
    """The source or the tests are not as the mutant has them; says what to look at."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """`before` stands in `file` once; with `after` in its place, each of `tests` fails.

    `before` may have other line breaks and comments than the file. Each of `tests` is PATH::NAME,
    below tests/.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def source(self, root: Path) -> str:
        """The file without the safeguard. Raises DoesNotApply."""
        path = root / self.file
        if not path.is_file():
            raise DoesNotApply(f"{self.name}: {self.file} is gone; where is this safeguard now?")
        text = path.read_text()
        if text.count(self.before) == 1:  # it may be of another language, in a string
            mutated = text.replace(self.before, self.after)
        else:
            begin, end = self._place(text)
            mutated = text[:begin] + self.after.strip() + text[end:]
        try:
            compile(mutated, self.file, "exec")
        except SyntaxError as error:
            raise DoesNotApply(
                f"{self.name}: {self.file} would not be Python any more: {error}"
            ) from None
        return mutated

    def _place(self, text: str) -> tuple[int, int]:
        """Where the tokens of `before` stand, in characters. Raises DoesNotApply."""
        tokens = _tokens(text)
        wanted = [token.text for token in _tokens(self.before.strip())]
        size = len(wanted)
        places = [
            (tokens[at].begin, tokens[at + size - 1].end)
            for at in range(len(tokens) - size + 1)
            if all(tokens[at + i].text == wanted[i] for i in range(size))
        ]
        if len(places) != 1:
            where = f"stands {len(places)} times in {self.file}, not once"
            raise DoesNotApply(f"{self.name}: {where}; where is this safeguard now?\n{self.before}")
        return places[0]

    def check(self, root: Path) -> None:
        """Raises DoesNotApply unless the safeguard is where it was, and each test is there."""
        self.source(root)
        check_tests(self.tests, root)


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    begin: int  # in characters of the source
    end: int


_LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENDMARKER,
}


def _tokens(text: str) -> list[_Token]:
    """Without layout, comments, and commas before a closing bracket; adjacent strings as one."""
    starts = list(accumulate((len(line) for line in text.splitlines(keepends=True)), initial=0))
    found: list[_Token] = []
    try:
        for token in tokenize.generate_tokens(StringIO(text).readline):
            if token.type in _LAYOUT:
                continue
            begin = starts[token.start[0] - 1] + token.start[1]
            end = starts[token.end[0] - 1] + token.end[1]
            word = token.string
            if word in {")", "]", "}"} and found and found[-1].text == ",":
                found.pop()
            last = found[-1] if found else None
            if token.type == tokenize.STRING and last and (joined := _joined(last.text, word)):
                found[-1] = _Token(joined, last.begin, end)
            else:
                found.append(_Token(word, begin, end))
    except (tokenize.TokenError, IndentationError):
        pass  # the part of a statement ends before its brackets or its block do
    return found


def _joined(first: str, second: str) -> str:
    """Two string literals with the same prefix and quotes as one; empty if they are not."""
    one, other = (re.fullmatch(r"([a-zA-Z]*([\"']))(.*)\2", text) for text in (first, second))
    if one is None or other is None or one[1] != other[1]:
        return ""
    return f"{one[1]}{one[3]}{other[3]}{one[2]}"


def check_tests(tests: Iterable[str], root: Path) -> None:
    """Raises DoesNotApply unless each test is there."""
    for test in tests:
        file, _, name = test.partition("::")
        path = root / "tests" / file
        if not path.is_file() or name not in _functions(path):
            raise DoesNotApply(f"there is no test {test}")


@functools.cache
def _functions(path: Path) -> set[str]:
    found = ast.walk(ast.parse(path.read_text()))
    return {one.name for one in found if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
