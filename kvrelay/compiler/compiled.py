"""Compiles C++ for this processor, once. The libraries are kept in the user's cache folder.

A prebuilt library (kvrelay.compiler.prebuilt) is used instead if there is one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvrelay.compiler import prebuilt


class NativeUnavailable(Exception):
    """The kernels cannot be compiled or loaded on this machine. The message gives the cause and a
    remedy.
    """


FLAGS = [
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-fopenmp",
    "-fPIC",
]
# Timeout of the compiler, per file: a worker waits for the kernels.
SECONDS = 180


@functools.cache
def compiled(sources: Path) -> ctypes.CDLL:
    """Returns the files of a folder as one library. The first call on a machine takes some seconds.
    Raises NativeUnavailable.
    """
    path = prebuilt.find(sources, frozenset(_processor().split()))
    try:
        if path is None:
            compiler = find_compiler()
            path = _cache_folder() / f"{sources.parent.name}-{key(compiler, sources)}.so"
            if not path.exists():
                build(compiler, sources, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        message = (
            f"{path} cannot be written or loaded: {error}; remove it, or set XDG_CACHE_HOME to "
            f"another folder"
        )
        raise NativeUnavailable(message) from error


def find_compiler() -> list[str]:
    """Returns the command of the C++ compiler: the one in CXX, else g++, else c++. Raises
    NativeUnavailable if there is none.
    """
    for command in (os.environ.get("CXX", "").split(), ["g++"], ["c++"]):
        if command and shutil.which(command[0]):
            return command
    raise NativeUnavailable("no C++ compiler found; install g++, or set CXX to a compiler")


def _cache_folder() -> Path:
    """Returns the cache folder. Only its owner may write to it, because the libraries in it are
    loaded.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "kvrelay"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except (OSError, RuntimeError) as error:
        raise NativeUnavailable(
            f"compiled kernels cannot be stored in {folder}: {error}; set XDG_CACHE_HOME to a "
            "folder with write access"
        ) from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NativeUnavailable(
            f"{folder} is writable for other users, so compiled kernels are not loaded from "
            "it; set XDG_CACHE_HOME"
        )
    return folder


def key(compiler: list[str], sources: Path) -> str:
    """Returns a hash of everything that the library depends on: the sources, the compiler command
    and flags, and the processor.
    """
    digest = hashlib.sha256()
    for source in sorted(sources.iterdir()):
        digest.update(source.read_bytes())
    digest.update(" ".join([*compiler, *FLAGS, platform.machine()]).encode())
    digest.update(_processor().encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Returns the line of /proc/cpuinfo that lists the instruction sets of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def build(
    compiler: list[str],
    sources: Path,
    path: Path,
    options: Sequence[str] = (),
    timeout_s: float = SECONDS,
) -> None:
    """Compiles the sources into the library `path`. `options` follow FLAGS; the last option of each
    kind takes effect. `timeout_s` is per run of the compiler.

    Processes that build at the same time write separate files. The process that renames its file
    last determines the result. Raises NativeUnavailable.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        files = sorted(sources.glob("*.cpp"))
        objects = [Path(folder, file.name).with_suffix(".o") for file in files]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            compiled = [
                pool.submit(
                    _run,
                    [*compiler, *FLAGS, *options, "-c", str(file), "-o", str(target)],
                    timeout_s,
                )
                for file, target in zip(files, objects, strict=True)
            ]
            for done in compiled:
                done.result()
        linked = Path(folder, path.name)
        link = [*compiler, *FLAGS, *options, "-shared", *map(str, objects), "-o", str(linked)]
        _run(link, timeout_s)
        linked.rename(path)


def _run(command: list[str], timeout_s: float) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.CalledProcessError as error:
        raise NativeUnavailable(
            f"{shlex.join(command)} failed: {error.stderr.strip()[-500:]}"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{shlex.join(command)}: {error}") from error
