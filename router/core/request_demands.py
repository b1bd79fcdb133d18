"""Requests that not every worker can serve, while workers of several versions run. Pure."""

from __future__ import annotations

from collections.abc import Sequence

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


def _asked_by(names: Sequence[str]) -> str:
    """What asks for a feature in HTTP's requests, if that has another name."""
    return " (echo with logprobs)" if "prompt_logprobs" in names else ""


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
        f"no worker of this cluster supports {' and '.join(names)}{_asked_by(names)}: all run an "
        f"engine without it, such as vLLM, or an older release of kvrelay; send the request "
        f"without {' and '.join(names)}, or change or upgrade the workers",
        field=names[0],
    )
