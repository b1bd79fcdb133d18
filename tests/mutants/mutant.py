"""A safeguard taken out: one replacement in one file, and the tests that must fail then."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class DoesNotApply(Exception):
    """The source or the tests are not as the mutant has them; says what to look at."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """`before` stands in `file` once; with `after` in its place, each of `tests` fails (PATH::NAME below tests/)."""

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
        if (times := text.count(self.before)) != 1:
            where = f"stands {times} times in {self.file}, not once; where is this safeguard now?"
            raise DoesNotApply(f"{self.name}: {where}\n{self.before}")
        mutated = text.replace(self.before, self.after)
        try:
            compile(mutated, self.file, "exec")
        except SyntaxError as error:
            raise DoesNotApply(f"{self.name}: {self.file} would not be Python any more: {error}") from None
        return mutated

    def check(self, root: Path) -> None:
        """Raises DoesNotApply unless the safeguard is where it was, and each test is there."""
        self.source(root)
        check_tests(self.tests, root)


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
