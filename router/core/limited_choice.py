"""Requests that not every worker can serve, while workers of several versions run. Pure."""

from __future__ import annotations

from kvrelay.errors import Unimplemented
from kvrelay.types.workers import ModelVersion
from router.core.compatibility import features_of
from router.core.lifecycle import Lifecycle
from router.core.workers.worker_table import Workers

Demand = ModelVersion | str
"""What a request demands of its workers: the model version that began the answer, or a feature."""


def demands(life: Lifecycle) -> set[Demand]:
    """Returns what the request demands of its workers."""
    found: set[Demand] = set() if life.model is None else {life.model}
    return found.union(features_of(life.request.sampling))


def limiting(life: Lifecycle, workers: Workers) -> set[Demand]:
    """Returns the demands of the request that some worker does not meet. Requests without them
    need not wait for this one.
    """
    return {
        one
        for one in demands(life)
        if not (workers.all_serve(one) if isinstance(one, ModelVersion) else workers.all_have(one))
    }


def unsupported(life: Lifecycle, workers: Workers) -> Unimplemented | None:
    """Returns the error of a request with sampling parameters that no decode worker knows, because
    all are too old for it.
    """
    sampling = life.request.sampling
    if not workers.any_decodes or workers.any_follows(sampling):
        return None
    # The features have the names of the fields.
    names = features_of(sampling)
    return Unimplemented(
        f"no worker of this cluster supports {' and '.join(names)}: all run an older release of "
        f"kvrelay; upgrade the workers, or send the request without {' and '.join(names)}",
        field=names[0],
    )
