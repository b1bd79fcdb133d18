"""The dispatcher's record of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.engine.kvcache.block_hashes import BlockHasher
from router.core.lifecycle import Lifecycle
from router.core.queueing.fair_queue import Share, Ticket
from router.core.workers.worker_table import Claim


@dataclass(slots=True)
class Entry:
    """A request that has not ended, with its place in the queue or on workers."""

    life: Lifecycle
    ticket: Ticket
    share: Share
    # Returns a new hasher for a block size.
    hasher: Callable[[int], BlockHasher]
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
    # By block size. Pools may have different block sizes.
    hashers: dict[int, BlockHasher] = field(default_factory=dict)

    def hashes(self, block_size: int) -> Sequence[bytes]:
        """Returns the block hashes of the sequence so far. They exclude the model version, since
        they are only compared with blocks of the same worker.
        """
        if block_size not in self.hashers:
            self.hashers[block_size] = self.hasher(block_size)
        hasher = self.hashers[block_size]
        if len(hasher.hashes) >= self.life.num_tokens // block_size:
            # A placement asks once for each worker, and the sequence is long.
            return hasher.hashes
        return hasher.extend(self.life.sequence)
