"""A `kvrelay` command in a child process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from kvrelay.errors import ConfigError, KvRelayError, Unavailable
from kvrelay.process.child import (
    REASON_FILE,
    bound_to_parent,
    family,
    send_signal,
    signal_name,
)
from kvrelay.process.telemetry import get_logger

_BAD_USAGE = 2

log = get_logger("cluster")


class ChildCommand:
    """A `kvrelay` command in a child process, which ends with this process."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, reason_file: Path | None = None
    ) -> None:
        self.name = name
        self.process = process
        self._reason_file = reason_file

    @classmethod
    async def start(
        cls,
        name: str,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        log_file: IO[bytes] | None = None,
        reason_file: Path | None = None,
    ) -> ChildCommand:
        """Starts the command. This process reads the stdout of a router. All other output goes to
        `log_file`, or else to this process's stderr. `variables` are added to the environment.

        If the command fails, it writes the reason to `reason_file`, if given; `end` returns that
        reason in its error.
        """
        environment = {name: value for name, value in os.environ.items() if name != REASON_FILE}
        environment |= variables or {}
        if reason_file is not None:
            environment[REASON_FILE] = str(reason_file)
        process = await asyncio.create_subprocess_exec(
            *bound_to_parent(sys.executable, "-m", "kvrelay.cli.main", name, *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if name == "router" else log_file or sys.stderr,
            stderr=log_file,
            env=environment,
            # Ctrl-C must reach only the parent, which stops its children in order.
            start_new_session=True,
        )
        return cls(name, process, reason_file)

    async def line(self) -> str:
        """Returns the next line of stdout. Raises the error of `end` if the process ends first."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise await self.end()
        return line.decode().rstrip("\n")

    async def end(self) -> KvRelayError:
        """Waits until the process has ended by itself. Returns the corresponding error."""
        code = await self.process.wait()
        reason = self._reason()
        if code == _BAD_USAGE:
            return ConfigError(
                reason
                or f"the {self.name} rejected the model or the configuration; the reason is "
                "in the log"
            )
        return Unavailable(
            reason
            or (
                f"the {self.name} was ended by {signal_name(-code)}"
                if code < 0
                else f"the {self.name} ended though nobody asked it to"
                if code == 0
                else f"the {self.name} ended with exit code {code}; the log has the cause"
            )
        )

    def _reason(self) -> str:
        """Returns the reason that the process wrote; empty if it wrote none."""
        try:
            return "" if self._reason_file is None else self._reason_file.read_text()
        except OSError:
            return ""

    async def stop(self, timeout_s: float) -> int:
        """Asks the process to end, and kills it after `timeout_s`. Returns its exit code."""
        if self.process.returncode is None:
            send_signal(self.process, signal.SIGTERM)
            try:
                async with asyncio.timeout(timeout_s):
                    await self.process.wait()
            except TimeoutError:
                log.warning("process_killed", process=self.name, after_seconds=timeout_s)
                self.kill()
        return await self.process.wait()

    def halt(self) -> None:
        """Asks the process, which `stop` has asked before, to end at once."""
        if self.process.returncode is None:
            send_signal(self.process, signal.SIGTERM)

    def kill(self) -> None:
        """Kills the process and everything it has started. Some of Ray's processes would otherwise
        live for another minute.
        """
        if self.process.returncode is None:
            for pid in family(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
