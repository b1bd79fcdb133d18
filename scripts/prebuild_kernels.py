"""Compiles the CPU kernels for each kind of x86 processor, into the folder that KVRELAY_KERNELS is
to name.

Usage: python scripts/prebuild_kernels.py DIR
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import kv_transfer
from kvrelay.compiler.compiled import build, find_compiler
from kvrelay.compiler.prebuilt import PROCESSORS, library
from kvrelay.engine.native.build import SOURCES as ENGINE

TRANSFER = Path(kv_transfer.__file__).parent / "kernels"


def prebuild(folder: Path, every: Sequence[Path] = (ENGINE, TRANSFER)) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for sources in every:
        for processor in PROCESSORS:
            build(find_compiler(), sources, folder / library(sources, processor), processor.options)


if __name__ == "__main__":
    prebuild(Path(sys.argv[1]))
