"""The machine that this process runs on: processor, cores, memory and GPUs."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from kvrelay.compiler.prebuilt import PROCESSORS

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NVIDIA = Path("/proc/driver/nvidia/gpus")
# Files in /dev, of the drivers that Ray supports.
_GPU_DEVICES = ("nvidia[0-9]*", "nvidiactl", "dxg", "kfd", "accel*")


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
