"""Programs that start in a process which was prepared for them."""

from __future__ import annotations

import sys


def prepared(statements: str, *command: str) -> list[str]:
    """Returns the command line that runs Python statements, then `command` in the same process.

    `command` begins with an absolute path. A preexec_fn would fork the tests' process, whose gRPC
    servers do not survive forks reliably.
    """
    program = f"import os, sys\n{statements}\nos.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", program, *command]
