"""Runs the cases of a client script, one at a time, on request of `run_clients.py`.

The script writes lines of JSON: first the names of its cases, then `{"answer": …}` or
`{"error": …}` for each line of standard input, which is the name of a case. This file requires the
standard library only.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

# Last lines of a traceback in an error.
_LINES = 12


@dataclass(frozen=True)
class Server:
    """The cluster that a case uses."""

    # http://HOST:PORT.
    url: str
    model: str

    @property
    def openai(self) -> str:
        """The base URL for clients of OpenAI's API."""
        return f"{self.url}/v1"


# Asserts on what the client returns, and returns the part that has to be the same in each run.
Case = Callable[[Server], Any]


T = TypeVar("T")
# One loop for all cases: libraries keep their connections, which belong to a loop.
_LOOP = asyncio.new_event_loop()


def wait(coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the result of the coroutine."""
    return _LOOP.run_until_complete(coroutine)


def serve_cases(cases: Mapping[str, Case]) -> None:
    """Runs cases until standard input ends. The arguments of the script are URL and model."""
    server = Server(*sys.argv[1:3])
    # Libraries may print; only answers may go to the runner.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(line: Any) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    tell(list(cases))
    for line in sys.stdin:
        try:
            told = {"answer": cases[line.strip()](server)}
        # Whatever a library raises is the result of the case.
        except BaseException:  # noqa: BLE001
            told = {"error": "".join(traceback.format_exc().splitlines(True)[-_LINES:])}
        tell(told)
