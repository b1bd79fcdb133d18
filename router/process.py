"""Settings of the router's own process."""

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
# Number of allocations between two collections of young objects.
YOUNG_OBJECTS = 50_000
# Limit on open files: a socket for each allowed connection, and room for everything else. HTTP
# connections take half of the files at most, and those of each of the two gRPC listeners an eighth.
FILES = 16384


def allow_connections() -> None:
    """Raises this process's limit on open files, which is 1024 on many systems, up to the hard
    limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < FILES:
        log.warning("open_files_limit_low", limit=wanted, wanted=FILES)


def open_files() -> int:
    """Returns the limit on open files of this process, at most FILES."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return FILES if soft == resource.RLIM_INFINITY else min(FILES, soft)


def end_after(seconds: float) -> None:
    """Ends the process after `seconds` with exit code 1 and the stacks of all threads on stderr. A
    later call replaces the timeout.

    A thread of faulthandler ends the process. That thread needs no Python lock.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)


def end_now(code: int = 0) -> NoReturn:
    """Ends the process when its work is done. A normal exit would wait for threads that cannot be
    stopped.
    """
    flush_logs()
    for stream in (sys.stdout, sys.stderr):
        # The reader of the stream may have closed it.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def settle_heap() -> None:
    """Excludes the current heap from garbage collection, so that collections pause the streams for
    less time. Call it when everything is loaded.

    Requests leave reference cycles, cancelled requests most of all. If young objects are collected
    less often than by default, those collections free most of the cycles. The remaining cycles
    would wait for a full collection, which stops the event loop for tenths of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)


def favour_the_loop() -> None:
    """Lowers the priority of all other threads. Call it when the gRPC servers run, so that their
    thread does not interrupt the event loop for each message.

    On a single core, where the two threads would alternate for every token, this saves about a
    sixth of the CPU time.
    """
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and thread.native_id is not None:
            try:
                os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))
            # A sandbox may not support this call. The router then runs slower but correctly.
            except OSError as error:
                log.debug("thread_priority_unchanged", thread=thread.name, reason=error.strerror)
