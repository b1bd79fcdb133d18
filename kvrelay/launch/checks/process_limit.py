"""The limits on processes and threads of this user and this control group."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import Unavailable

# Threads of a cluster without its workers, most of them Ray's, and of each worker. Counted on two
# cores; Ray has more of them on larger machines.
_CLUSTER, _WORKER = 200, 40
# Of each further process of a router, with the processes that it starts.
_ROUTER = 20
# The folder of this control group as a container sees it, in version 2 and version 1.
_CONTROL_GROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/pids"))
_PROCESSES = Path("/proc")
# The kernel applies RLIMIT_NPROC to everybody else.
_ROOT = 0


@dataclass(frozen=True, slots=True)
class ProcessLimit:
    """How many processes and threads may run, and how many run already."""

    name: str
    most: int
    running: int
    remedy: str


def process_limits() -> Iterator[ProcessLimit]:
    """Yields the limits of this process; the kernel counts threads as processes."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and os.getuid() != _ROOT:
        yield ProcessLimit("ulimit -u", most, _threads_of(os.getuid()), "raise it: ulimit -u 4096")
    for folder in _CONTROL_GROUPS:
        # There is no such control group, or the file contains the word max.
        with contextlib.suppress(OSError, ValueError):
            most = int((folder / "pids.max").read_text())
            running = int((folder / "pids.current").read_text())
            remedy = "raise it, in a container for instance with --pids-limit=4096"
            yield ProcessLimit("pids.max of the control group", most, running, remedy)


def check_processes(workers: int, routers: int = 1) -> None:
    """Raises Unavailable if the processes of a cluster with so many workers, and processes of its
    router, cannot all start.
    """
    needed = _CLUSTER + _WORKER * workers + _ROUTER * (routers - 1)
    for limit in process_limits():
        if limit.running + needed > limit.most:
            raise Unavailable(
                f"{limit.name} allows {limit.most} processes and threads, of which "
                f"{limit.running} run already, and a cluster with {workers} workers needs about "
                f"{needed}; {limit.remedy}"
            )


def _threads_of(user: int) -> int:
    count = 0
    for folder in _PROCESSES.iterdir():
        # Processes end meanwhile.
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and folder.stat().st_uid == user:
                count += len(os.listdir(folder / "task"))
    return count
