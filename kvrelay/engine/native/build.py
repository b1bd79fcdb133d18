"""The kernels, compiled."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from kvrelay.compiler.compiled import compiled

SOURCES = Path(__file__).parent / "kernels"


@functools.cache
def library() -> ctypes.CDLL:
    """Raises NativeUnavailable and says why."""
    return compiled(SOURCES)
