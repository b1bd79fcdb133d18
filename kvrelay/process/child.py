"""Child processes that end with their parent, and process information from the kernel."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
from pathlib import Path

REASON_FILE = "KVRELAY_REASON_FILE"
"""Names a file that a command writes why it failed into, in place of stderr; for the process that
started it.
"""

# Runs before the program, in the same process. It asks the kernel for SIGKILL when the parent dies
# (PR_SET_PDEATHSIG is 1), then replaces itself with the program. A preexec_fn would be unsafe once
# the parent has threads.
_EXEC_BOUND_TO_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.getppid() == int(sys.argv[1]) or sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def bound_to_parent(program: str, *arguments: str) -> list[str]:
    """Returns the command line that runs `program`, an absolute path, and kills it when this
    process dies.

    The kernel ties the child to the thread that starts it, so start it from a thread that lives as
    long as the process.
    """
    return [
        sys.executable,
        "-I",
        "-S",
        "-c",
        _EXEC_BOUND_TO_PARENT,
        str(os.getpid()),
        program,
        *arguments,
    ]


def send_signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Sends a signal to a process that has not been seen to end.

    The `send_signal` of the process polls it, and for an ended process takes the exit status away
    from asyncio. asyncio then logs a warning and reports 255.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


async def stop(process: asyncio.subprocess.Process, timeout_s: float) -> int:
    """Asks the process to end, and kills it after `timeout_s`. Returns its exit code."""
    send_signal(process, signal.SIGTERM)
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        send_signal(process, signal.SIGKILL)
    return await process.wait()


def kill(pid: int, timeout_ms: int) -> None:
    """Ends a process at once, and waits until it has ended, `timeout_ms` at most: one that is in
    the kernel ends only when it leaves it.
    """
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            ended = select.poll()
            ended.register(descriptor, select.POLLIN)
            ended.poll(timeout_ms)
        finally:
            os.close(descriptor)


def family(pid: int) -> list[int]:
    """Returns the ids of the process and of all its live descendants."""
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            # Threads may start and end during the loop.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children += map(int, (thread / "children").read_text().split())
    return [pid, *(one for child in children for one in family(child))]


def command_of(pid: int) -> str:
    """Returns the name of a running process; empty if it does not run."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        # Or it ended between the opening of the file and its reading.
        return ""
    return "" if rest.split()[0] == "Z" else name


def signal_name(number: int) -> str:
    """Returns the name of a signal. Python has none for most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
