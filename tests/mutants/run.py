"""Takes out each safeguard in turn and sees its tests fail: `make mutants`.

    python tests/mutants/run.py [WORD ...]     only mutants whose name has one of the words

All happens in copies of the source tree, one for each core, which are gone afterwards. The tests
are run once with nothing taken out, since a test that fails anyway catches nothing. Exit code 1 if
a mutant survives or does not apply any more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue

# The packages that folders of tests are named after
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutants.catalogue import MUTANTS
from mutants.mutant import ROOT, DoesNotApply, Mutant
from support.source import PACKAGES

OTHERS = (
    "tests",
    "proto",
    "configs",
    "scripts",
    "benchmarks",
    "examples",
    "k8s",
    "pyproject.toml",
    "README.md",
)
# A test that takes longer hangs, which is one way to fail; time-outs of gRPC might end it after a
# minute
TEST_S = 40
# A test that pytest cannot end, as one that waits in a destructor, is killed after this time.
HUNG_S = 300
NO_TESTS_FAILED, SOME_TESTS_FAILED = 0, 1  # pytest's exit codes; any other is not about the tests


class Copy:
    """Of the source tree, where one mutant at a time lives."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in (*PACKAGES, *OTHERS):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, root / name)
        self._environment = {**os.environ, "PYTHONPATH": str(root)}
        # Each mutant starts processes, which would compile everything anew.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        where = self._python(
            "-c", "import router, kvrelay; print(kvrelay.__file__, router.__file__)"
        ).stdout
        if where.split() != [str(root / one / "__init__.py") for one in ("kvrelay", "router")]:
            raise SystemExit(f"the copy in {root} is not what would be tested, but {where}")

    def outcome(
        self, *tests: str, jobs: int = 0, hung_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Returns what pytest said, up to the first that fails. jobs: processes beside pytest's
        own. Raises DoesNotApply if they cannot be run, and TimeoutExpired after `hung_s` seconds.
        """
        options = ["-x", "-p", "no:cacheprovider", "--tb=line", "--timeout", str(TEST_S)]
        if jobs:
            options += ["-n", str(jobs), "--dist", "loadfile"]
        named = [f"tests/{test}" for test in tests]
        done = self._python("-m", "pytest", *options, *named, seconds=hung_s)
        if done.returncode not in (NO_TESTS_FAILED, SOME_TESTS_FAILED):
            raise DoesNotApply(
                f"pytest ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
            )
        return done

    def without(self, mutant: Mutant) -> float:
        """Seconds that its tests took to fail, each in a process of its own: one that hangs may
        take pytest along.

        Raises DoesNotApply, or Survived for tests that passed.
        """
        path = self.root / mutant.file
        whole = path.read_text()
        self._write(path, mutant.source(self.root))
        begin = time.monotonic()
        try:
            passed = [test for test in mutant.tests if self._passes(test)]
        finally:
            self._write(path, whole)
        if passed:
            raise Survived(", ".join(passed))
        return time.monotonic() - begin

    def _passes(self, test: str) -> bool:
        try:
            return self.outcome(test, hung_s=HUNG_S).returncode == NO_TESTS_FAILED
        except subprocess.TimeoutExpired:
            return False

    def _write(self, path: Path, source: str) -> None:
        """Replaces a file, and what was compiled of it: the file may be as old and as long as
        before.
        """
        path.write_text(source)
        Path(cache_from_source(path)).unlink(missing_ok=True)

    def _python(
        self, *words: str, seconds: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.root,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )


class Survived(Exception):
    """The tests that passed without the safeguard."""


class Copies:
    """Copies of the source tree, each of which has one mutant at a time."""

    def __init__(self, copies: list[Copy]) -> None:
        self._free: SimpleQueue[Copy] = SimpleQueue()
        for copy in copies:
            self._free.put(copy)

    def verdict(self, mutant: Mutant) -> tuple[bool, str]:
        """Returns whether the mutant was caught, and a text about it."""
        copy = self._free.get()
        try:
            seconds = copy.without(mutant)
            return True, f"caught   {seconds:5.1f} s  {', '.join(mutant.tests)}"
        except Survived as survivors:
            return False, f"SURVIVED          {survivors} passed without it"
        except DoesNotApply as error:
            return False, f"DOES NOT APPLY    {error}"
        finally:
            self._free.put(copy)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="WORD")
    words = parser.parse_args().words
    chosen = [one for one in MUTANTS if not words or any(word in one.name for word in words)]
    if not chosen:
        parser.error(f"no mutant's name has {' or '.join(words)} in it")
    jobs = min(len(chosen), os.cpu_count() or 1)
    bad = 0
    with ExitStack() as folders:
        copies = [
            Copy(
                Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="kvrelay-mutants-")))
            )
            for _ in range(jobs)
        ]
        tests = sorted({test for one in chosen for test in one.tests})
        whole = copies[0].outcome(*tests, jobs=jobs)
        if whole.returncode != NO_TESTS_FAILED:
            print(f"{whole.stdout}\nthis fails with nothing taken out")
            return 1
        width = max(len(one.name) for one in chosen)
        with ThreadPoolExecutor(jobs) as pool:
            verdicts = pool.map(Copies(copies).verdict, chosen)
            for one, (caught, text) in zip(chosen, verdicts, strict=True):
                bad += not caught
                print(f"{one.name:{width}}  {text}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} mutants were caught")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
