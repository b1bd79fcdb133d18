"""The id of a model: a hash over every byte of the files that affect its output.

    file's digest = XXH3-128 over the XXH3-128 of each PART_BYTES of it (several threads)
    model's id    = XXH3-128 over (name, size, digest) of each file, by name

A file's digest is cached in the user's cache folder, keyed by the file's metadata: path, device,
inode, size, modification time and change time. A recently written file is hashed each time, since
another write may fall within the resolution of its times.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import xxhash

from kvrelay.errors import ModelRefused

PART_BYTES = 64 * 2**20
READ_BYTES = 4 * 2**20
# Minimum age of a file's last change, in ns, before its digest is cached.
SETTLED_NS = 2 * 10**9
MAX_THREADS = 8


def model_digest(files: Iterable[Path], cache: Path | None = None) -> str:
    """The model's id: 128 bits, hexadecimal.

    `cache` is the folder for digests; a folder that is not writable is not used. Raises
    ModelRefused for a file that cannot be read or that changes while it is read.
    """
    cache = digest_cache() if cache is None else cache
    whole = xxhash.xxh3_128()
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "model-digest") as threads:
        for path in sorted(set(files), key=lambda path: path.name):
            try:
                size, digest = _file_digest(path, cache, threads)
            except OSError as error:
                raise ModelRefused(f"{path}: cannot be read: {error}") from error
            whole.update(json.dumps([path.name, size, digest]).encode())
    return whole.hexdigest()


def digest_cache() -> Path:
    """The default folder for digests: XDG_CACHE_HOME, or ~/.cache, plus kvrelay/model-digests."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kvrelay" / "model-digests"


def _file_digest(path: Path, cache: Path, threads: ThreadPoolExecutor) -> tuple[int, str]:
    """(size in bytes, digest). Raises OSError, ModelRefused."""
    now = time.time_ns()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        stat = os.fstat(descriptor)
        place = str(path.resolve())
        key = [place, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        entry = cache / f"{hashlib.blake2b(place.encode(), digest_size=16).hexdigest()}.json"
        known = _kept(entry, key)
        if known is not None:
            return stat.st_size, known
        starts = range(0, stat.st_size, PART_BYTES)
        parts = threads.map(lambda start: _part_digest(descriptor, start), starts)
        digest = xxhash.xxh3_128(b"".join(parts)).hexdigest()
        after = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if (after.st_size, after.st_mtime_ns, after.st_ctime_ns) != (
        stat.st_size,
        stat.st_mtime_ns,
        stat.st_ctime_ns,
    ):
        raise ModelRefused(
            f"{path}: the file changed while it was read; start again when the copy is complete"
        )
    if now - max(stat.st_mtime_ns, stat.st_ctime_ns) >= SETTLED_NS:
        _keep(entry, key, digest)
    return stat.st_size, digest


def _part_digest(descriptor: int, start: int) -> bytes:
    digest = xxhash.xxh3_128()
    end = start + PART_BYTES
    while start < end and (data := os.pread(descriptor, min(READ_BYTES, end - start), start)):
        digest.update(data)
        start += len(data)
    return digest.digest()


def _kept(entry: Path, key: list[object]) -> str | None:
    try:
        found = json.loads(entry.read_bytes())
    except (OSError, ValueError):
        return None
    valid = (
        isinstance(found, dict)
        and found.get("file") == key
        and isinstance(found.get("xxh3_128"), str)
    )
    return found["xxh3_128"] if valid else None


def _keep(entry: Path, key: list[object], digest: str) -> None:
    """Writes the entry atomically, since workers of one host may start together."""
    with suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False) as file:
            json.dump({"file": key, "xxh3_128": digest}, file)
        os.replace(file.name, entry)
