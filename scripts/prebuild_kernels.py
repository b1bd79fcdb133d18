"""Compiles the CPU kernels for each kind of x86 processor into a folder, for KVRELAY_KERNELS.

Requires only a C++ compiler, the sources of the kernels and the package kvrelay.compiler. So an
image build does not recompile the kernels after a change of other code.

Usage: python scripts/prebuild_kernels.py DIR
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kvrelay.compiler.compiled import build, find_compiler
from kvrelay.compiler.prebuilt import PROCESSORS, library

ROOT = Path(__file__).resolve().parents[1]
# Long, because no worker waits for the compilation and the build machine may be slow.
TIMEOUT_S = 1800.0
SOURCES = (ROOT / "kvrelay/engine/native/kernels", ROOT / "kv_transfer/kernels")


def prebuild(folder: Path, every: Sequence[Path] = SOURCES) -> None:
    """Compiles each folder of sources for each kind of processor. Raises NativeUnavailable."""
    folder.mkdir(parents=True, exist_ok=True)
    for sources in every:
        for processor in PROCESSORS:
            target = folder / library(sources, processor)
            build(find_compiler(), sources, target, processor.options, TIMEOUT_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="Folder to write the kernels to.")
    prebuild(parser.parse_args().folder)
