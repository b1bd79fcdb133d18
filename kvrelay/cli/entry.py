"""Where the `kvrelay` command begins: Ctrl-C ends it quietly, also while its modules load."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""


def main() -> None:
    """Loads the command line, runs it, and exits with its code.

    Until the command line runs, and again when it has ended, Ctrl-C ends the process at once: there
    is nothing to clean up, and an exception inside an import would be printed as a traceback.
    """
    # A shell starts background jobs with SIGINT ignored, and they stay so.
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_usual:
        signal.signal(signal.SIGINT, _end)
    from kvrelay.cli.main import main as run_command_line

    try:
        if is_usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run_command_line()
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    finally:
        if is_usual:
            signal.signal(signal.SIGINT, _end)


def _end(*_: object) -> None:
    os._exit(INTERRUPTED)
