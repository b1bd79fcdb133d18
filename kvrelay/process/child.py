"""Child processes that do not outlive their parent, and what the kernel knows of processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

REASON_FILE = "KVRELAY_REASON_FILE"
"""Names a file that a command writes why it failed into, in place of stderr; for the process that
started it.
"""

# Runs in place of the program until it is one: asks the kernel for SIGKILL when the parent dies
# (PR_SET_PDEATHSIG is 1), in a process of its own because a preexec_fn is unsafe once the parent
# has threads.
_EXEC_BOUND_TO_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.getppid() == int(sys.argv[1]) or sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def bound_to_parent(program: str, *arguments: str) -> list[str]:
    """The command line that runs `program`, an absolute path, and has it killed when this process
    dies.

    The kernel ties the child to the thread that starts it: start it from one that lasts.
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
    """To one that was not yet seen to end.

    The process's own `send_signal` looks whether it runs, and takes the exit status of one that
    does not away from asyncio, which then complains and tells 255.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


async def stop(process: asyncio.subprocess.Process, timeout_s: float) -> int:
    """Asks it to end, and ends it after `timeout_s`; returns its exit code."""
    send_signal(process, signal.SIGTERM)
    try:
        async with asyncio.timeout(timeout_s):
            await process.wait()
    except TimeoutError:
        send_signal(process, signal.SIGKILL)
    return await process.wait()


def family(pid: int) -> list[int]:
    """The process and all that it and its children have started, as far as they live."""
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            # Threads come and go meanwhile
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children += map(int, (thread / "children").read_text().split())
    return [pid, *(one for child in children for one in family(child))]


def command_of(pid: int) -> str:
    """Of a process that runs; nothing, if it does not."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    except FileNotFoundError:
        return ""
    return "" if rest.split()[0] == "Z" else name
