"""The kernels as users have them, and built for processors that lack their instructions."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrelay.engine.native import build, ops, program

PORTABLE = {  # what is optimised is slow to compile; with AVX2 it shows what the optimiser does to sums
    "avx2": ("x86-64-v3", "-O1"),
    "baseline": ("x86-64", "-O0"),
}


@pytest.fixture(scope="session")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """portable(name) -> the kernels built for such a processor, once a session."""
    built: dict[str, ctypes.CDLL] = {}

    def library(name: str) -> ctypes.CDLL:
        if name not in built:
            processor, optimised = PORTABLE[name]
            replaced = {"-march=native": f"-march={processor}", "-O3": optimised}
            path = tmp_path_factory.mktemp("kernels") / f"{name}.so"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(build, "FLAGS", [replaced.get(flag, flag) for flag in build.FLAGS])
                build._build(build._compiler(), path)
            built[name] = ctypes.CDLL(str(path))
        return built[name]

    return library


@pytest.fixture(scope="module", params=["native", *PORTABLE])
def kernels(request: pytest.FixtureRequest, portable: Callable[[str], ctypes.CDLL]) -> Iterator[str]:
    """Lets all operations of a module run by one library after the other."""
    name: str = request.param
    with pytest.MonkeyPatch.context() as patch:
        if name != "native":
            flags = Path("/proc/cpuinfo").read_text() if platform.machine() == "x86_64" else ""
            if (" avx2 " if name == "avx2" else " sse2 ") not in flags:
                pytest.skip("this processor cannot run them")
            library = portable(name)
            for module in (ops, program):
                patch.setattr(module, "library", lambda: library)
        yield name
