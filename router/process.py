"""What a router asks of the process that it has to itself."""

from __future__ import annotations

import gc
import os
import resource
import threading

from kvrelay.telemetry import get_logger

log = get_logger("router.process")


FILES = 8192  # open at one time: a socket for each connection that the listeners allow, and room for all else


def allow_connections() -> None:
    """Raises this process's limit of open files, which is 1024 on many systems, as far as it may itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < FILES:
        log.warning("few files may be open, so connections are refused early", limit=wanted, wanted=FILES)


def settle_heap() -> None:
    """To be called when all is loaded: it stays, and no later collection stops the streams to look at it."""
    gc.collect()
    gc.freeze()


def favour_the_loop() -> None:
    """To be called when gRPC's servers run: their thread no longer interrupts the event loop to tell of each message.

    On one core, where the two would take turns for every token, this saves about a sixth of the processor's time.
    """
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and thread.native_id is not None:
            try:
                os.sched_setscheduler(thread.native_id, os.SCHED_BATCH, os.sched_param(0))
            except OSError as error:  # a sandbox may not know it; slower, but right
                log.debug("thread keeps its scheduling", thread=thread.name, reason=error.strerror)
