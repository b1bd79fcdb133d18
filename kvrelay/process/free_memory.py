"""The memory of this machine that nothing uses at the moment."""

from __future__ import annotations

import contextlib
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
# (limit, in use) of the control group, in versions 2 and 1.
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def available_bytes(total: int) -> int:
    """Returns the bytes that new processes can use without swapping, at most `total`.

    In a control group with a limit, its page cache counts as used, so that the result is too low
    rather than too high.
    """
    found = total
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found = min(found, 1024 * int(line.split()[1]))
    for limit, used in _CGROUPS:
        # There is no such control group, or it has no limit.
        with contextlib.suppress(OSError, ValueError):
            found = min(found, max(0, int(limit.read_text()) - int(used.read_text())))
    return found
