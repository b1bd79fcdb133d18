"""Compiles the native kernels."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from kvrelay.compiler.compiled import compiled

SOURCES = Path(__file__).parent / "kernels"


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels, built at the first call. Raises NativeUnavailable with the reason."""
    return compiled(SOURCES)
