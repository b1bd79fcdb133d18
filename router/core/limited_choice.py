"""Requests that not every worker can serve, while workers of several versions run. Pure."""

from __future__ import annotations

from kvrelay.errors import Unimplemented
from kvrelay.protocol_version import GUIDANCE
from kvrelay.types.workers import ModelVersion
from router.core.lifecycle import Lifecycle
from router.core.workers.worker_table import Workers

Demand = ModelVersion | str
"""What a request demands of its workers: the model version that began the answer, or a feature."""


def demands(life: Lifecycle) -> set[Demand]:
    """Returns what the request demands of its workers."""
    found: set[Demand] = set() if life.model is None else {life.model}
    return found if life.request.sampling.guidance is None else found | {GUIDANCE}


def limiting(life: Lifecycle, workers: Workers) -> set[Demand]:
    """Returns the demands of the request that some worker does not meet. Requests without them
    need not wait for this one.
    """
    sampling = life.request.sampling
    return {
        one
        for one in demands(life)
        if not (
            workers.all_serve(one)
            if isinstance(one, ModelVersion)
            else workers.all_follow(sampling)
        )
    }


def unsupported(life: Lifecycle, workers: Workers) -> Unimplemented | None:
    """Returns the error of a request with guidance if all decode workers are too old for it."""
    sampling = life.request.sampling
    if not workers.any_decodes or workers.any_follows(sampling):
        return None
    return Unimplemented(
        "no worker of this cluster supports guidance: all run an older release of kvrelay; "
        "upgrade the workers, or send the request without guidance",
        field="guidance",
    )
