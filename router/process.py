"""What a router asks of the process that it has to itself."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import resource
import sys
import threading
from typing import NoReturn

from kvrelay.process.telemetry import flush_logs, get_logger

log = get_logger("router.process")


_STDERR = 2
YOUNG_OBJECTS = 50_000  # allocated before the collector looks at what came since it last did
# Open at one time: a socket for each connection that the listeners allow, and room for all else
FILES = 8192


def allow_connections() -> None:
    """Raises this process's limit of open files, which is 1024 on many systems, as far as it may
    itself.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < FILES:
        log.warning("open_files_limit_low", limit=wanted, wanted=FILES)


def end_after(seconds: float) -> None:
    """Ends the process then, with exit code 1 and the stacks of all threads on stderr. A later call
    counts instead.

    A thread of faulthandler's own does it, which needs no lock of Python's.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)


def end_now() -> NoReturn:
    """Ends the process, whose work is done, with exit code 0. Python would wait for threads that
    cannot be stopped.
    """
    flush_logs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it has gone
            stream.flush()
    os._exit(0)


def settle_heap() -> None:
    """To be called when all is loaded: it stays, and no later collection stops the streams to look
    at it.

    Requests leave reference cycles behind, above all those that are cancelled. Most are gone when
    the young objects are looked at, if that is less often than by default; those that are not would
    be found by a collection of all objects, which stops the event loop for tenths of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)


def favour_the_loop() -> None:
    """To be called when gRPC's servers run: their thread no longer interrupts the event loop to
    tell of each message.

    On one core, where the two would take turns for every token, this saves about a sixth of the
    processor's time.
    """
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and thread.native_id is not None:
            try:
                os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))
            except OSError as error:  # a sandbox may not know it; slower, but right
                log.debug("thread_priority_unchanged", thread=thread.name, reason=error.strerror)
