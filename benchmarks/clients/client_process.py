"""A client script in a process of its own, in the environment of its library."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.errors import DeadlineExceeded, Unavailable
from kvrelay.process.child import bound_to_parent

# Longest line that a script may write.
_LINE = 2**24
_SETTINGS = {
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "ANONYMIZED_TELEMETRY": "false",
    # LiteLLM would fetch a list of prices.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What a case returned, or why it failed."""

    answer: Any = None
    error: str = ""


class ClientProcess:
    """A running script. Its cases run one at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._cases, self._answers = process, process.stdin, process.stdout

    async def cases(self) -> list[str]:
        """Returns the names of the script's cases."""
        found: list[str] = await self._line()
        return found

    async def run(self, case: str, within_s: float) -> CaseResult:
        """Runs a case. Raises DeadlineExceeded if it takes longer, and Unavailable if the script
        ends. After an error, the process is of no more use.
        """
        self._cases.write(f"{case}\n".encode())
        await self._cases.drain()
        try:
            return CaseResult(**await asyncio.wait_for(self._line(), within_s))
        except TimeoutError:
            raise DeadlineExceeded(f"{case} did not end within {within_s:g} s") from None

    async def _line(self) -> Any:
        line = await self._answers.readline()
        if not line:
            raise Unavailable("the script ended; its log tells why")
        return json.loads(line)


@asynccontextmanager
async def client_process(
    python: Path, script: Path, url: str, model: str, log: Path
) -> AsyncIterator[ClientProcess]:
    """Yields the script for a server, with its other output in `log`. Ends it on exit."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *bound_to_parent(str(python), str(script), url, model),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            env=os.environ | _SETTINGS,
            limit=_LINE,
        )
    try:
        yield ClientProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
