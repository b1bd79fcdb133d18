"""An answer is continued by workers of the model version that began it. Pure."""

from __future__ import annotations

from kvrelay.errors import FailedPrecondition, Unavailable
from router.core.lifecycle import Lifecycle
from router.core.request import Request
from router.core.request_record import Entry
from router.core.workers.worker_table import Workers

# Time in which a worker with the model version of an answer must appear after the last such worker
# is gone.
GONE_S = 30.0


def check_model(request: Request, workers: Workers) -> None:
    """Raises FailedPrecondition if no worker serves the model version that began the answer."""
    model = request.model
    if model is None or request.complete is not None:
        return
    if workers.any_decodes and not workers.serves(model):
        raise FailedPrecondition(
            f"the tokens in resume are from model version {model.fingerprint!r:.150}, "
            "which no worker serves; send the request again without resume and "
            "system_fingerprint",
            field="system_fingerprint",
        )


def model_is_gone(entry: Entry, workers: Workers, now: float) -> bool:
    """Whether the model version that began the answer has had no worker for GONE_S, while another
    version has workers. Notes since when.
    """
    model = entry.life.model
    if model is None or entry.life.state != "queued":
        entry.lone_since = None
        return False
    if workers.serves(model) or not workers.any_decodes:
        entry.lone_since = None
        return False
    entry.lone_since = now if entry.lone_since is None else entry.lone_since
    return now - entry.lone_since >= GONE_S


def model_gone_error(life: Lifecycle) -> Unavailable:
    """Returns the error of a request whose model version is gone."""
    fingerprint = "" if life.model is None else life.model.fingerprint
    return Unavailable(
        f"model version {fingerprint!r:.150} generated the first {len(life.tokens)} tokens, "
        "and no worker serves it any more; send the request again from its start"
    )
