"""The dispatcher's record of a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.types.workers import WorkerInfo
from router.core.lifecycle import Lifecycle
from router.core.prefixes.prompt_blocks import PromptBlocks
from router.core.queueing.fair_queue import Share, Ticket
from router.core.workers.worker_table import Claim


@dataclass(slots=True)
class Entry:
    """A request that has not ended, with its place in the queue or on workers."""

    life: Lifecycle
    ticket: Ticket
    share: Share
    # Returns a new hasher for a block size and a layout hash.
    hasher: Callable[[int, str], BlockHasher]
    # Set while the request has workers.
    claim: Claim | None = None
    # Start of the first attempt. The time that the request spent preempted is added.
    begun: float | None = None
    attempt_begun: float = 0.0
    # Start of the attempt that ended with the lifecycle's fault.
    fault_begun: float = 0.0
    # Set while the request waits after a preemption.
    preempted_at: float | None = None
    # Time since which other model versions have workers, but the request's version has none.
    lone_since: float | None = None
    # By block size and layout hash. Pools may have different layouts.
    hashed: dict[tuple[int, str], PromptBlocks] = field(default_factory=dict)

    def blocks(self, info: WorkerInfo) -> PromptBlocks:
        """Returns the blocks of the sequence so far, with the hashes that the worker gives them."""
        layout = info.block_size, info.layout_hash
        found = self.hashed.get(layout)
        if found is None:
            found = self.hashed[layout] = PromptBlocks(self.hasher(*layout))
        if not found.covers(self.life.num_tokens):
            found.extend(self.life.sequence)
        return found
