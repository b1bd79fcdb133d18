"""How the C library reuses freed memory."""

from __future__ import annotations

import ctypes

# Options of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MESSAGE = 16 * 2**20
_KEPT = 128 * 2**20


def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory, for processes that receive many large messages. Returns False
    if the C library has no mallopt.

    By default glibc maps each large buffer and unmaps it when it is freed, so every buffer costs a
    page fault per 4 KiB. For a message of 1 MiB over gRPC, that costs about as much as the rest of
    receiving it.
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
