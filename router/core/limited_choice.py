"""Requests that not every worker can serve, while workers of several versions run. Pure."""

from __future__ import annotations

from kvrelay.errors import KvRelayError, Unavailable, Unimplemented
from kvrelay.types.workers import ModelVersion
from router.core.compatibility import features_of
from router.core.lifecycle import RETRY_AFTER_S, Lifecycle
from router.core.workers.worker_table import Workers

Demand = ModelVersion | str
"""What a request demands of its workers: the model version that began the answer, or a feature or
adapter."""


def demands(life: Lifecycle) -> set[Demand]:
    """Returns what the request demands of its workers."""
    found: set[Demand] = set() if life.model is None else {life.model}
    adapter = life.request.adapter
    return found.union(features_of(life.request.sampling), (adapter,) if adapter else ())


def limiting(life: Lifecycle, workers: Workers) -> set[Demand]:
    """Returns the demands of the request that some worker does not meet. Requests without them
    need not wait for this one.
    """
    return {
        one
        for one in demands(life)
        if not (workers.all_serve(one) if isinstance(one, ModelVersion) else workers.all_have(one))
    }


def unsupported(life: Lifecycle, workers: Workers) -> KvRelayError | None:
    """Returns the error of a request that no decode worker can serve: its adapter is gone, or all
    workers are too old for its sampling parameters.
    """
    sampling, adapter = life.request.sampling, life.request.adapter
    if adapter and workers.any_decodes and not workers.any_offers(adapter):
        return Unavailable(
            f"no worker has version {adapter[:8]} of the request's adapter; its files have changed "
            "or it was unloaded; send the request again",
            retry_after_s=RETRY_AFTER_S,
        )
    if not workers.any_decodes or workers.any_follows(sampling):
        return None
    # The features have the names of the fields.
    names = features_of(sampling)
    return Unimplemented(
        f"no worker of this cluster supports {' and '.join(names)}: all run an older release of "
        f"kvrelay; upgrade the workers, or send the request without {' and '.join(names)}",
        field=names[0],
    )
