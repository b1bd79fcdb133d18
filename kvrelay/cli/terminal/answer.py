"""An answer that arrives in pieces, on the terminal of a person who waits for it."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from kvrelay.cli.terminal.notes import note
from kvrelay.cli.views.typed_text import TypedText

# Seconds without a token after which a person is told.
_SILENT_S = 5.0
_POLL_S = 0.2


def print_answer(pieces: Iterable[str]) -> None:
    """Prints an answer as it arrives, and ends its line, also before an error. With stderr on a
    terminal, a note says when no token came for `_SILENT_S`.
    """
    text = TypedText(sys.stdout)

    def tell() -> None:
        if sys.stdout.isatty():
            text.end_line()
        note(f"no token for {_SILENT_S:g} s; still waiting for the cluster, Ctrl-C ends the answer")

    with SilenceWatch(tell if sys.stderr.isatty() else None, _SILENT_S) as watch:
        try:
            for piece in pieces:
                with watch.token():
                    text.add(piece)
        except BaseException:
            with watch.token():
                text.end_line()
            raise
    print()


class SilenceWatch:
    """Calls `tell` in another thread, once for each pause of `seconds` between tokens; without
    `tell`, never. A context manager.
    """

    def __init__(self, tell: Callable[[], None] | None, seconds: float) -> None:
        self._tell = tell
        self._seconds = seconds
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._last = time.monotonic()

    def __enter__(self) -> SilenceWatch:
        if self._tell is not None:
            threading.Thread(target=self._watch, args=(self._tell,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed.set()

    @contextmanager
    def token(self) -> Iterator[None]:
        """Keeps `tell` from being called while a token is printed, and ends the pause."""
        with self._lock:
            yield
            self._last = time.monotonic()

    def _watch(self, tell: Callable[[], None]) -> None:
        while not self._closed.wait(min(_POLL_S, self._seconds)):
            with self._lock:
                paused_s = time.monotonic() - self._last
                if paused_s >= self._seconds and not self._closed.is_set():
                    # Once for each pause.
                    self._last = math.inf
                    tell()
