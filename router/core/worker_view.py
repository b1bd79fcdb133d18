"""A worker as the policies see it."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.types.workers import UNKNOWN_MODEL, ModelVersion, PoolName


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as seen by one request. Counts cover only this router's own requests."""

    worker_id: str
    pool: PoolName
    # The worker refused a request recently, or its sequences use all its room, or it is a prefill
    # worker that takes no prompt.
    full: bool = False
    # Prompt tokens that the worker computes before the first token of this request, besides those
    # of the request, as estimated.
    queued_tokens: int = 0
    # Whether the worker is about to need another prompt to prefill.
    takes_prompt: bool = True
    # Prompt tokens per second: 0 if the answers of a decode worker leave no time within their ITL,
    # None if unknown.
    prompt_rate: float | None = None
    # Decode: tokens of the sequences on the worker.
    held_tokens: int = 0
    # Tokens of this request that the worker's prefix cache will hold when the request comes.
    cached_tokens: int = 0
    # The part of these that the worker does not hold yet, but computes for another request before.
    coming_tokens: int = 0
    # Whether the worker has told what it holds. Otherwise it is an estimate.
    exact: bool = False
    # Grows with each assignment.
    last_assigned: int = 0
    address: str = ""
    host_id: str = ""
    block_size: int = 0
    # The worker fails, or is much slower than the rest of its pool.
    sick: bool = False
    model: ModelVersion = UNKNOWN_MODEL
    # See `WorkerInfo.windows`.
    windows: str = ""

    @property
    def stored_tokens(self) -> int:
        """Tokens of this request that the worker's prefix cache holds now."""
        return self.cached_tokens - self.coming_tokens

    @property
    def holds(self) -> str:
        """The verb that says how certain `cached_tokens` is."""
        if not self.exact:
            return "should hold"
        return "will hold" if self.coming_tokens else "holds"
