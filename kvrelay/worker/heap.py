"""How the C library keeps memory that was freed."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)
_LARGEST_MESSAGE = 16 * 2**20
_KEPT = 128 * 2**20


def keep_freed_memory() -> bool:
    """For processes that receive many large messages. False where the C library has no mallopt.

    glibc maps a large buffer when it is taken and unmaps it when it is freed, so that each one
    costs a page fault for every 4 KiB: for a message of 1 MiB over gRPC, about as much as all the
    rest of receiving it.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    options = (
        (_MMAP_THRESHOLD, _LARGEST_MESSAGE),
        (_TRIM_THRESHOLD, _KEPT),
        (_TOP_PAD, _LARGEST_MESSAGE),
    )
    return all(libc.mallopt(option, value) for option, value in options)
