"""Kernels from a folder: which of them, and what if there is none for this processor."""

from __future__ import annotations

from pathlib import Path

import pytest
from prebuild_kernels import prebuild

from kvrelay.compiler import compiled, prebuilt
from kvrelay.compiler.compiled import NativeUnavailable
from kvrelay.compiler.prebuilt import PROCESSORS, find, library

NEWEST = frozenset(flag for processor in PROCESSORS for flag in processor.flags)
SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "part" / "kernels"
    folder.mkdir(parents=True)
    (folder / "one.cpp").write_text(SOURCE)
    return folder


@pytest.fixture
def folder(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As an image has it."""
    built = tmp_path / "built"
    prebuild(built, [sources])
    monkeypatch.setenv(prebuilt.VARIABLE, str(built))
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")  # no compiler from here on
    return built


def test_each_processor_gets_the_first_library_that_it_can_run(sources: Path, folder: Path) -> None:
    assert len(list(folder.iterdir())) == len(PROCESSORS)
    for processor in PROCESSORS:
        found = find(sources, frozenset(processor.flags))
        assert found == folder / library(sources, processor)
    assert find(sources, NEWEST) == folder / library(sources, PROCESSORS[0])
    assert find(sources, NEWEST - {"avx512_bf16"}) == folder / library(sources, PROCESSORS[2])
    assert find(sources, NEWEST - {"avx2"}) is None


def test_it_is_loaded_where_there_is_no_compiler(sources: Path, folder: Path) -> None:
    if find(sources, frozenset(Path("/proc/cpuinfo").read_text().split())) is None:
        pytest.skip("this processor has no AVX2")
    assert compiled.compiled(sources).answer() == 42


def test_a_library_of_other_sources_is_not_taken(sources: Path, folder: Path) -> None:
    (sources / "one.cpp").write_text(SOURCE.replace("42", "43"))
    assert find(sources, NEWEST) is None
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler"):
        compiled.compiled(sources)


def test_a_broken_library_is_named(sources: Path, folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(b"not a library")
    if find(sources, frozenset(Path("/proc/cpuinfo").read_text().split())) is None:
        pytest.skip("this processor has no AVX2")
    with pytest.raises(NativeUnavailable, match=r"part-.* cannot be written or loaded"):
        compiled.compiled(sources)
