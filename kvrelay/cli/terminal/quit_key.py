"""Ends a full-screen command by the key q."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds between looks at whether the command has ended.
_LOOK_S = 0.2
_KEYS = (b"q", b"Q")


@contextmanager
def quit_key() -> Iterator[str]:
    """While the context is open, the key q interrupts the main thread, as Ctrl-C does. Yields the
    name of the key that ends the command: Ctrl-C if stdin is not a terminal.
    """
    if not sys.stdin.isatty():
        yield "Ctrl-C"
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    ended = threading.Event()
    reader = threading.Thread(target=_read, args=(descriptor, ended), daemon=True)
    # Keys arrive one by one and are not echoed. Ctrl-C still sends its signal.
    tty.setcbreak(descriptor)
    try:
        reader.start()
        yield "q"
    finally:
        ended.set()
        reader.join()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _read(descriptor: int, ended: threading.Event) -> None:
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    while not ended.is_set():
        if not ready.poll(_LOOK_S * 1000):
            continue
        keys = os.read(descriptor, 64)
        if any(key in keys for key in _KEYS):
            os.kill(os.getpid(), signal.SIGINT)
        if not keys:
            return
