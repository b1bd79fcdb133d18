"""What is measured, and on what."""

from __future__ import annotations

import os
from pathlib import Path

from kvrelay.bench.reference_model import NAME, reference_model
from kvrelay.errors import InvalidArgument, NotFound
from kvrelay.models import resolve_model


def model_folder(model: str) -> str:
    if model == NAME:
        return str(reference_model())
    try:
        return resolve_model(model)
    except NotFound as error:
        raise InvalidArgument(f"{error.message}, or {NAME!r}", field="model") from error


def machine_name() -> str:
    """The processor's name, as the kernel has it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown CPU",
    )


def first_cores(count: int) -> tuple[int, ...]:
    """Of those that this process may use. Raises InvalidArgument if there are not as many."""
    allowed = sorted(os.sched_getaffinity(0))
    if count > len(allowed):
        raise InvalidArgument(
            f"{count} threads are more than the {len(allowed)} cores that may be used here"
        )
    return tuple(allowed[:count])
