"""Hosts on one machine: network, process and mount namespaces, with a network between them that
nobody else sees.

A world is a process tree in namespaces of its own, with a bridge in it; `enter_world` puts this
process's successor there. A host is another such tree in that world, on a cable to the bridge.
Killing a host's first process kills all its processes at once, as the kernel does it; pulling its
cable first keeps the others from hearing of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvrelay.process.child import bound_to_parent, family

NETWORK = "10.77.0"
WORLD_ADDRESS = f"{NETWORK}.254"  # of the world itself, where clients are
# Of each host, on a network that leads nowhere: who binds or announces it is not reached
_DECOY = "172.31.99.1/24"
_IN_WORLD = "KVRELAY_TEST_WORLD"
_TOOLS = ("unshare", "nsenter", "ip", "mount", "bash")
_NAMESPACES = ("--net", "--mount", "--pid", "--uts")
# The first process of a host: private folders, then nothing but to collect those whose parents have
# died.
_INIT = """
mount -t tmpfs tmpfs /dev/shm && mount --bind "$1" "$0" && ip link set lo up || exit 1
echo up
while :; do sleep 3600 & wait $!; done
"""


def missing() -> str:
    """Why there can be no hosts here; nothing if there can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if lacking := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"needs {', '.join(lacking)}"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "true"], capture_output=True, text=True, check=False
    )
    return (
        f"the kernel makes no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""
    )


def world_command(script: Path, *arguments: str) -> list[str]:
    """The command line that runs a Python script in a world of its own. All that it starts ends
    with it.
    """
    unshare = shutil.which("unshare")
    assert unshare is not None
    inside = ["env", f"{_IN_WORLD}=1", sys.executable, str(script), *arguments]
    return bound_to_parent(unshare, *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", *inside)


async def wait_for(command: Sequence[str]) -> int:
    """Runs it; returns its exit code."""
    return await (await asyncio.create_subprocess_exec(*command)).wait()


def in_world() -> bool:
    return _IN_WORLD in os.environ


async def _run(*command: str) -> None:
    """Raises RuntimeError with what it said."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: {said.decode(errors='replace').strip()}")


async def make_network() -> None:
    """The world's bridge, with an address for this process."""
    await _run("ip", "link", "set", "lo", "up")
    await _run("ip", "link", "add", "switch", "type", "bridge")
    await _run("ip", "address", "add", f"{WORLD_ADDRESS}/24", "dev", "switch")
    await _run("ip", "link", "set", "switch", "up")


class Host:
    """A machine, as far as its processes can see. `scratch` is a folder that each host has its own
    of.
    """

    def __init__(self, number: int, folder: Path) -> None:
        """Its output, and what it has in `scratch`, is in `folder` under its number."""
        self.number = number
        self.address = f"{NETWORK}.{number}"
        self.scratch = folder / "scratch"
        self._own = folder / str(number)
        self._log = (folder / f"{number}.log").open("ab")
        self._pid = 0
        self._unshare: asyncio.subprocess.Process | None = None

    @property
    def cable(self) -> str:
        """Of the link's end at the bridge."""
        return f"host{self.number}"

    async def boot(self) -> None:
        self.scratch.mkdir(exist_ok=True)
        self._own.mkdir()
        unshare = shutil.which("unshare")
        assert unshare is not None
        shell = (
            "--fork",
            "--kill-child",
            "--mount-proc",
            "bash",
            "-c",
            _INIT,
            str(self.scratch),
            str(self._own),
        )
        self._unshare = await asyncio.create_subprocess_exec(
            *bound_to_parent(unshare, *_NAMESPACES, *shell),
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        assert self._unshare.stdout is not None
        if await self._unshare.stdout.readline() != b"up\n":
            raise RuntimeError(f"host {self.number} did not come up; {self._log.name} may say why")
        self._pid = family(self._unshare.pid)[1]
        await _run(
            "ip",
            "link",
            "add",
            self.cable,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            str(self._pid),
        )
        await _run("ip", "link", "set", self.cable, "master", "switch", "up")
        for words in (
            ("address", "add", f"{self.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "add", "decoy", "type", "bridge"),
            ("address", "add", _DECOY, "dev", "decoy"),
            ("link", "set", "decoy", "up"),
        ):
            await _run(*self._inside("ip", *words))

    async def start(
        self, *command: str, environment: Mapping[str, str] | None = None, stdout: int | None = None
    ) -> asyncio.subprocess.Process:
        """A process on this host. Its output goes to the log, but for stdout if that is a pipe."""
        return await asyncio.create_subprocess_exec(
            *self._inside(*command),
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout or self._log,
            stderr=self._log,
        )

    async def run(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """Its stdout. Raises RuntimeError if it fails."""
        process = await self.start(*command, environment=environment, stdout=subprocess.PIPE)
        said, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(
                f"{' '.join(command)} on {self.address} ended with {process.returncode}: {said!r}"
            )
        return said.decode()

    async def unplug(self) -> None:
        """From now on nothing comes from it and nothing reaches it, and nobody is told."""
        await _run("ip", "link", "set", self.cable, "down")

    def kill_only(self, name: str) -> None:
        """Its processes of that name."""
        for pid in family(self._pid):
            if Path(f"/proc/{pid}/comm").read_text() == f"{name}\n":
                os.kill(pid, 9)

    def kill(self) -> None:
        """All its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, 9)

    async def off(self) -> None:
        if self._unshare is not None:
            self.kill()
            await self._unshare.wait()
        self._log.close()

    def _inside(self, *command: str) -> Sequence[str]:
        entries = ("--net", "--mount", "--pid", "--uts", f"--wd={Path.cwd()}")
        return ("nsenter", "--target", str(self._pid), *entries, "--", *command)
