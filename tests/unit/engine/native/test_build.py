"""Where the kernels come from, and what is said where they cannot be had."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.compiler import compiled as compiling
from kvrelay.compiler.compiled import NativeUnavailable, compiled
from kvrelay.engine.native import build, ops, program
from kvrelay.engine.runner import ModelRunner
from kvrelay.errors import ConfigError


def load() -> ctypes.CDLL:
    """Not what this process has loaded already."""
    return compiled.__wrapped__(build.SOURCES)


COPYING = """#!/bin/sh
# A compiler that takes its time and gives what was compiled before.
while [ $# -gt 0 ]; do [ "$1" = -o ] && target=$2; shift; done
sleep 0.2
cp {library} "$target"
"""


@pytest.fixture(scope="session")
def kernels_here() -> Path:
    return Path(build.library()._name)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvrelay"


def compiler(path: Path, script: str) -> str:
    path.write_text(script)
    path.chmod(0o700)
    return str(path)


def test_what_was_compiled_is_loaded_again(
    cache: Path, kernels_here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = compiler(tmp_path / "c++", COPYING.format(library=kernels_here))
    monkeypatch.setenv("CXX", f"{script} -some -option")
    first = load()
    first.kvrelay_set_threads(1)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    (kept,) = cache.iterdir()
    compiler(tmp_path / "c++", "#!/bin/sh\nexit 1\n")
    assert load()._name == first._name == str(kept)
    monkeypatch.setenv("CXX", f"{script} -another -option")
    with pytest.raises(NativeUnavailable, match="another"):
        load()


def test_the_library_is_another_one_for_other_sources(tmp_path: Path) -> None:
    key = compiling.key(["g++"], build.SOURCES)
    assert compiling.key(["clang++"], build.SOURCES) != key
    sources = Path(shutil.copytree(build.SOURCES, tmp_path / "kernels"))
    assert compiling.key(["g++"], sources) == key
    with (sources / "words.h").open("a") as file:
        file.write("\n")
    assert compiling.key(["g++"], sources) != key


def test_processes_that_build_at_the_same_time(
    cache: Path, kernels_here: Path, tmp_path: Path
) -> None:
    script = compiler(tmp_path / "c++", COPYING.format(library=kernels_here))
    program = (
        "from kvrelay.engine.native.build import library; library().kvrelay_set_threads(1); "
        "print('loaded')"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "CXX": script},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["loaded\n"] * 3
    assert len(list(cache.iterdir())) == 1


def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    return r"no C\+\+ compiler found; install g\+\+, or set CXX"


def failing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    script = "#!/bin/sh\necho what is -march >&2\nexit 4\n"
    monkeypatch.setenv("CXX", compiler(tmp_path / "c++", script))
    return r"c\+\+ -std=c\+\+20 .* failed: what is -march(; set weights: auto)?$"


def compiler_of_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    script = COPYING.format(library="/proc/self/status")
    monkeypatch.setenv("CXX", compiler(tmp_path / "c++", script))
    return (
        r"native-[0-9a-f]{16}.so cannot be written or loaded: .*; remove it, or set XDG_CACHE_HOME"
    )


def folder_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "cache" / "kvrelay"
    folder.mkdir(parents=True)
    folder.chmod(0o770)
    return "cache/kvrelay is writable for other users"


def file_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "cache").write_text("")
    return r"compiled kernels cannot be stored in .*cache/kvrelay: .*; set XDG_CACHE_HOME"


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    "spoil",
    [no_compiler, failing_compiler, compiler_of_rubbish, folder_of_others, file_for_a_folder],
)
def test_without_kernels_torch_serves_and_the_reason_is_told(
    spoil: Callable[[Path, pytest.MonkeyPatch], str],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = str(tiny_model())
    says = spoil(tmp_path, monkeypatch)
    with pytest.raises(NativeUnavailable, match=says):
        load()
    for module in (ops, program):
        monkeypatch.setattr(module, "library", load)
    runner = ModelRunner.load(folder, block_size=16, kv_bytes=1 << 20)
    assert runner.kernels == "torch"
    with pytest.raises(NativeUnavailable, match=says):
        raise NativeUnavailable(runner.without_kernels)
    with pytest.raises(ConfigError, match=f"weights: int8 needs the native kernels: .*{says}"):
        ModelRunner.load(folder, block_size=16, kv_bytes=1 << 20, weights="int8")


def test_a_processor_that_multiplies_wrongly_is_told_before_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops.check()

    def nothing(reference: Any) -> None:  # all zeros, of the first product, which is in float32
        call = reference._obj
        ctypes.memset(call.y, 0, call.rows * call.outputs * 4)

    monkeypatch.setattr(
        program,
        "library",
        lambda: SimpleNamespace(kvrelay_linear=nothing, kvrelay_quantize=lambda _: None),
    )
    with pytest.raises(
        NativeUnavailable,
        match=r"the kernels compute wrong matrix products on this processor, 100.0% off",
    ):
        ops.check()
