"""The machine that this process runs on: processor, cores, memory and GPUs."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from kvrelay.compiler.prebuilt import PROCESSORS

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NVIDIA = Path("/proc/driver/nvidia/gpus")
# Files in /dev, of the drivers that Ray supports.
_GPU_DEVICES = ("nvidia[0-9]*", "nvidiactl", "dxg", "kfd", "accel*")
# Columns of /proc/stat: idle, and idle while input or output is in progress.
_IDLE = (3, 4)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a cluster can use on this machine."""

    processor: str
    # Kind of processor that the CPU kernels are written for, or "other".
    kernels: str
    # Cores that this process may use.
    cores: int
    # That this process and its children may use.
    memory_bytes: int
    # Names of the NVIDIA GPUs. For other drivers, their device files.
    gpus: tuple[str, ...]

    @classmethod
    def here(cls) -> Machine:
        """Looks at this machine."""
        return cls(
            processor_name(), _kernels(), len(os.sched_getaffinity(0)), _memory_bytes(), _gpus()
        )

    def __str__(self) -> str:
        gpus = ", ".join(self.gpus) or "no GPU"
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        return (
            f"{self.processor}, {cores}, {self.kernels} kernels, "
            f"{self.memory_bytes / 2**30:.3g} GiB, {gpus}"
        )


# Cores that background services of a quiet machine may use.
QUIET_CORES = 0.25


def busy_cores(seconds: float = 0.5, stat: Path = Path("/proc/stat")) -> float:
    """Returns how many cores of the host were busy during the next `seconds`, on average; this
    process only waits meanwhile. 0 if the host does not tell.
    """
    before = _cpu_times(stat)
    time.sleep(seconds)
    return _busy(before, _cpu_times(stat))


class OtherPrograms:
    """Measures how many cores other programs keep busy from now on."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._before = _cpu_times(stat)
        self._own = _own_seconds()
        self._began = time.monotonic()

    def cores(self) -> float:
        """Returns the mean number of busy cores of the host, without this process and its children
        that have ended. 0 if the host does not tell.
        """
        own = (_own_seconds() - self._own) / max(1e-9, time.monotonic() - self._began)
        return max(0.0, _busy(self._before, _cpu_times(self._stat)) - own)


def _own_seconds() -> float:
    return sum(os.times()[:4])


def _busy(before: list[int], after: list[int]) -> float:
    """Returns the mean number of busy cores between two looks."""
    spent = [max(0, late - early) for early, late in zip(before, after, strict=False)]
    if len(spent) <= _IDLE[-1] or not sum(spent):
        return 0.0
    idle = sum(spent[column] for column in _IDLE)
    return (os.cpu_count() or 1) * (1 - idle / sum(spent))


def _cpu_times(stat: Path) -> list[int]:
    """Returns the times of all cores together, by kind: proc(5), /proc/stat."""
    try:
        name, *times = stat.read_text().partition("\n")[0].split()
        # The last two are part of the first two.
        return [int(one) for one in times[:8]] if name == "cpu" else []
    except (OSError, ValueError):
        return []


def processor_name() -> str:
    """Returns the name of the processor from /proc/cpuinfo."""
    return _cpuinfo("model name") or "unknown CPU"


def _kernels() -> str:
    flags = frozenset(_cpuinfo("flags").split())
    return next((one.name for one in PROCESSORS if flags.issuperset(one.flags)), "other")


def _cpuinfo(key: str) -> str:
    """Returns the first value of a key of /proc/cpuinfo, or an empty string."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def _memory_bytes() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _CGROUP_LIMITS:
        # There is no such control group, or the file contains the word max.
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(Path(path).read_text()))
    return total


def _gpus() -> tuple[str, ...]:
    names = []
    for card in sorted(_NVIDIA.glob("*/information")):
        lines = card.read_text(errors="replace").splitlines()
        model = (line.partition(":")[2].strip() for line in lines if line.startswith("Model"))
        names.append(next(model, card.parent.name))
    return tuple(names) or tuple(
        str(file) for name in _GPU_DEVICES for file in sorted(Path("/dev").glob(name))
    )
