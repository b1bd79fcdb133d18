"""Runs the compiler. It ends with this process, and so do the processes that it starts."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys


class CompilerFailed(Exception):
    """The compiler ended with an error, or took too long. The message has its last words."""


# The parent of the compiler, in a process group of its own. The kernel sends it SIGTERM when the
# process that started it dies (PR_SET_PDEATHSIG is 1). Then it kills the whole group: a compiler
# that is killed alone leaves its passes running for minutes.
_SUPERVISOR = """
import ctypes, os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.getppid() == int(sys.argv[1]) or sys.exit("the parent is gone")
sys.exit(subprocess.call(sys.argv[2:]))
"""
# Characters of the compiler's output in an error.
_LAST_WORDS = 500


def run_compiler(command: list[str], timeout_s: float) -> None:
    """Runs a command of the compiler. Raises CompilerFailed."""
    supervised = [sys.executable, "-I", "-S", "-c", _SUPERVISOR, str(os.getpid()), *command]
    try:
        process = subprocess.Popen(
            supervised,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise CompilerFailed(f"{shlex.join(command)}: {error}") from error
    try:
        _, words = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise CompilerFailed(f"{shlex.join(command)} took longer than {timeout_s:g} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if process.returncode != 0:
        raise CompilerFailed(f"{shlex.join(command)} failed: {words.strip()[-_LAST_WORDS:]}")
