"""The priority of gRPC's own threads."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvrelay.process.telemetry import get_logger

# Names of the threads that receive and send, and of the one that starts more of them. A thread
# inherits the priority of the one that starts it.
_NAMES = frozenset({"event_engine", "lifeguard"})
# Added to the nice value. Four such threads get 30% of a core that the event loop wants too.
NICER = 10
_NICEST = 19

log = get_logger("router.grpc")


def lower_priority() -> None:
    """Lowers the priority of gRPC's threads below that of this thread. Call it with the first
    server.

    Several of them read the calls of a flood, most of which gRPC rejects by itself. With equal
    priorities, the event loop would get a quarter of a core, and the tokens of all tenants would
    wait. While the event loop is idle, they have the core.
    """
    nice = min(_NICEST, os.getpriority(os.PRIO_PROCESS, 0) + NICER)
    try:
        for thread in Path("/proc/self/task").iterdir():
            # A thread may have ended.
            with suppress(FileNotFoundError, ProcessLookupError):
                if (thread / "comm").read_text().strip() in _NAMES:
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)
    except OSError as error:
        # Some sandboxes forbid it. The router serves on, and a flood slows it down more.
        log.warning("grpc_priority_not_lowered", reason=str(error))
