"""The model, the machine and the cores of a benchmark."""

from __future__ import annotations

import os

from kvrelay.bench.reference_model import NAME, reference_model
from kvrelay.errors import InvalidArgument, NotFound
from kvrelay.models import resolve_model


def model_folder(model: str) -> str:
    """Returns the folder of a model: a folder, a hub id, or the name of the reference model. Raises
    InvalidArgument if there is no such model.
    """
    if model == NAME:
        return str(reference_model())
    try:
        return resolve_model(model)
    except NotFound as error:
        raise InvalidArgument(f"{error.message}, or {NAME!r}", field="model") from error


def first_cores(count: int) -> tuple[int, ...]:
    """Returns the first `count` cores that this process may use. Raises InvalidArgument if there
    are fewer.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if count > len(allowed):
        raise InvalidArgument(
            f"--threads {count} is more than the {len(allowed)} cores available to this process"
        )
    return tuple(allowed[:count])
