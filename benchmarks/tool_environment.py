"""Creates the Python environment of a package from PyPI, such as a load tool, and runs commands in
it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from kvrelay.errors import DeadlineExceeded, InvalidArgument, Unavailable
from kvrelay.process.child import bound_to_parent

# Name of the log in the folder of a run.
LOG = "log"
# Lines of the log in an error message.
_LAST_WORDS = 15
_SETTINGS = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Few threads and processes, because the cluster runs on the same cores.
    "OMP_NUM_THREADS": "1",
    "GUIDELLM__MAX_WORKER_PROCESSES": "1",
}


class Package(Protocol):
    """A package from PyPI."""

    @property
    def name(self) -> str:
        """The name on PyPI."""

    @property
    def requirements(self) -> tuple[tuple[str, ...], ...]:
        """Arguments of `pip install`, for each call."""


def install(tool: Package, cache: Path) -> Path:
    """Returns the Python of the package's environment under `cache`. Creates it on first use.
    Raises Unavailable if pip fails.
    """
    folder = cache / tool.name
    python = folder / "venv" / "bin" / "python"
    wanted = "\n".join(requirement for call in tool.requirements for requirement in call)
    # Written when the installation is complete.
    installed = folder / "installed.txt"
    if not installed.exists() or installed.read_text() != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        calls = [("-m", "pip", "install", *call) for call in tool.requirements]
        with (folder / "install.log").open("wb") as log:
            for command in (
                [sys.executable, "-m", "venv", "--clear", folder / "venv"],
                *([python, *one] for one in calls),
            ):
                if subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
                ).returncode:
                    raise _failure(tool.name, Path(log.name))
        installed.write_text(wanted)
    return python


def fresh_folder(path: Path) -> Path:
    """Creates an empty folder, which replaces the folder of an earlier run. Raises InvalidArgument
    if `path` is not the folder of a run.
    """
    if path.exists():
        if not (path / LOG).is_file():
            raise InvalidArgument(
                f"{path} exists and is not from an earlier run; use another --out"
            )
        shutil.rmtree(path)
    path.mkdir(parents=True)
    (path / LOG).touch()
    return path


def version(tool: Package, python: Path) -> str:
    """Returns the installed version of the package. Raises Unavailable if it is not installed."""
    code = f"import importlib.metadata as m; print(m.version({tool.name!r}))"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise Unavailable(f"{tool.name} is not installed in the environment of {python}")
    return asked.stdout.strip()


async def run(command: list[str], log: Path, within_s: float) -> None:
    """Runs a command with its output in `log`. Raises Unavailable if the command fails, and
    DeadlineExceeded after `within_s`.
    """
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *bound_to_parent(*command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | _SETTINGS,
        )
    try:
        code = await asyncio.wait_for(process.wait(), within_s)
    except TimeoutError:
        raise DeadlineExceeded(
            f"{command[0]} did not end within {within_s:g} s; its log is {log}"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code:
        raise _failure(command[0], log)


def _failure(what: str, log: Path) -> Unavailable:
    last = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_WORDS:])
    return Unavailable(f"{what} failed; its log is {log}\n{last}")
