"""Compiles the CPU kernels for each kind of x86 processor. Set KVRELAY_KERNELS to the folder to use
them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import kv_transfer
from kvrelay.compiler.compiled import build, find_compiler
from kvrelay.compiler.prebuilt import PROCESSORS, library
from kvrelay.engine.native.build import SOURCES as ENGINE

TRANSFER = Path(kv_transfer.__file__).parent / "kernels"


def prebuild(folder: Path, every: Sequence[Path] = (ENGINE, TRANSFER)) -> None:
    """Compiles the kernels of each source folder in `every` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for sources in every:
        for processor in PROCESSORS:
            build(find_compiler(), sources, folder / library(sources, processor), processor.options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="Folder to write the kernels to.")
    prebuild(parser.parse_args().folder)
