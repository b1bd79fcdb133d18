"""Compiles C++ for this processor, once. The libraries are kept in the user's cache folder.

A prebuilt library (kvrelay.compiler.prebuilt) is used instead if there is one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvrelay.compiler import prebuilt
from kvrelay.compiler.compiler_process import CompilerFailed, run_compiler


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
            path = _library(compiler, sources)
            if not path.exists():
                build(compiler, sources, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        message = (
            f"{path} cannot be written or loaded: {error}; remove it, or set XDG_CACHE_HOME to "
            f"another folder"
        )
        raise NativeUnavailable(message) from error


def is_compiled(sources: Path) -> bool:
    """Whether `compiled` returns at once. Also True if nothing can be compiled here."""
    if prebuilt.find(sources, frozenset(_processor().split())) is not None:
        return True
    try:
        return _library(find_compiler(), sources).exists()
    except NativeUnavailable:
        return True


def _library(compiler: list[str], sources: Path) -> Path:
    return _cache_folder() / f"{sources.parent.name}-{key(compiler, sources)}.so"


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

    Of several processes, one builds and the others wait. Files that were compiled when a process
    ended are not compiled again. Raises NativeUnavailable.
    """
    command = [*compiler, *FLAGS, *options]
    folder = path.with_name(f"{path.stem}-{key(command, sources)}.build")
    with _only_builder(folder):
        if path.exists():
            shutil.rmtree(folder)
            return
        files = sorted(sources.glob("*.cpp"))
        objects = [(folder / file.name).with_suffix(".o") for file in files]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            compiled = [
                pool.submit(_make, [*command, "-c", str(file)], target, timeout_s)
                for file, target in zip(files, objects, strict=True)
                if not target.exists()
            ]
            for done in compiled:
                done.result()
        _make([*command, "-shared", *map(str, objects)], path, timeout_s, folder)
        shutil.rmtree(folder)


@contextlib.contextmanager
def _only_builder(folder: Path) -> Iterator[None]:
    """Creates the folder and waits until no other process builds in it. A process that has built
    removes the folder, possibly between two calls here. Then it is created again.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_open_as(descriptor, folder):
                yield
                return
        finally:
            os.close(descriptor)


def _is_open_as(descriptor: int, folder: Path) -> bool:
    """Returns whether the folder is still the one that was opened. As in kvrelay.open_path, which
    the build of the image does not have: it has this package alone.
    """
    try:
        return os.path.samestat(folder.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _make(command: list[str], target: Path, timeout_s: float, folder: Path | None = None) -> None:
    """Runs the compiler for one file, which exists afterwards only if it is complete."""
    unfinished = (folder or target.parent) / f"{target.name}.part"
    try:
        run_compiler([*command, "-o", str(unfinished)], timeout_s)
    except CompilerFailed as error:
        raise NativeUnavailable(str(error)) from error
    unfinished.rename(target)
