"""The kernels as users have them, and built for processors that have fewer instructions, or a
matrix unit.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrelay.compiler import compiled
from kvrelay.engine.native import build, ops, program

# Compiled quickly; the optimiser still rearranges sums.
OTHERS = {
    "avx2": ["-march=x86-64-v3", "-O1"],
    "baseline": ["-march=x86-64", "-O1"],
    "tiles": ["-march=native", "-O1", "-DKVRELAY_EMULATE_TILES"],
}
NEEDED = {"avx2": " avx2 ", "baseline": " sse2 "}  # of the processor


@pytest.fixture(scope="session")
def other_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """other_library(name) -> the kernels built for such a processor, once for all processes that
    test.
    """
    here = tmp_path_factory.getbasetemp()
    folder = here.parent if "PYTEST_XDIST_WORKER" in os.environ else here

    @functools.cache
    def library(name: str) -> ctypes.CDLL:
        path = folder / f"kernels-{name}.so"
        with (folder / f"kernels-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                compiled.build(compiled.find_compiler(), build.SOURCES, path, OTHERS[name])
        return ctypes.CDLL(str(path))

    return library


@pytest.fixture(
    scope="module",
    params=["native", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)],
)
def kernels(
    request: pytest.FixtureRequest, other_library: Callable[[str], ctypes.CDLL]
) -> Iterator[str]:
    """Lets all operations of a module run by one library after the other."""
    name: str = request.param
    with pytest.MonkeyPatch.context() as patch:
        if name != "native":
            flags = Path("/proc/cpuinfo").read_text()
            if NEEDED.get(name, "") not in flags:
                pytest.skip("this processor cannot run them")
            library = other_library(name)
            for module in (ops, program):
                patch.setattr(module, "library", lambda: library)
        yield name
