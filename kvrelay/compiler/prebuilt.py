"""Libraries that were compiled elsewhere, one for each kind of processor. They are for container
images, which have no compiler.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "KVRELAY_KERNELS"
"""Names the folder of the libraries. What lies there is loaded: only who builds the image may write
to it.
"""

_V3 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


@dataclass(frozen=True, slots=True)
class Processor:
    """A kind of processor: its compiler options, and the flags in /proc/cpuinfo by which it is
    recognised.
    """

    name: str
    options: tuple[str, ...]
    flags: tuple[str, ...]


# The first match applies. The kernels have special code for each kind except the last.
PROCESSORS = (
    Processor(
        "amx",
        (
            "-march=x86-64-v4",
            "-mavx512vnni",
            "-mavx512bf16",
            "-mamx-tile",
            "-mamx-bf16",
            "-mamx-int8",
        ),
        (*_V4, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
    ),
    Processor(
        "avx512-bf16",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        (*_V4, "avx512_vnni", "avx512_bf16"),
    ),
    Processor("avx512-vnni", ("-march=x86-64-v4", "-mavx512vnni"), (*_V4, "avx512_vnni")),
    Processor("avx2", ("-march=x86-64-v3",), _V3),
)


def library(sources: Path, processor: Processor) -> str:
    """Returns the file name of a library. The name contains a hash of the sources, so a library of
    other sources is never loaded.
    """
    digest = hashlib.sha256()
    for source in sorted(sources.iterdir()):
        digest.update(source.read_bytes())
    return f"{sources.parent.name}-{processor.name}-{digest.hexdigest()[:16]}.so"


def find(sources: Path, flags: frozenset[str]) -> Path | None:
    """Returns the library for a processor with these flags. Returns None if there is no such
    library, or if the environment variable is not set.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    for processor in PROCESSORS:
        path = Path(folder, library(sources, processor))
        if flags.issuperset(processor.flags) and path.is_file():
            return path
    return None
