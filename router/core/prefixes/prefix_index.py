"""Which prefixes the workers hold: exact for workers that tell, an estimate for others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvrelay.worker_messages import CacheUpdate
from router.core.prefixes.cache_replica import CacheReplica
from router.core.prefixes.prefix_estimate import PrefixEstimate
from router.core.prefixes.prompt_blocks import PromptBlocks


class PrefixIndex:
    """The prefix caches of all known workers."""

    def __init__(self) -> None:
        self._replicas: dict[str, CacheReplica] = {}
        self._estimate = PrefixEstimate()
        # Of the workers that are gone.
        self._snapshots = 0
        self._gaps = 0

    def open(self, worker_id: str, exact: bool) -> None:
        """Adds a worker whose cache is unknown. `exact`: it will tell what it holds."""
        self.drop(worker_id)
        if exact:
            self._replicas[worker_id] = CacheReplica()

    def drop(self, worker_id: str) -> None:
        """Forgets the worker's blocks."""
        self._estimate.drop(worker_id)
        replica = self._replicas.pop(worker_id, None)
        if replica is not None:
            self._snapshots += replica.snapshots
            self._gaps += replica.gaps

    def is_exact(self, worker_id: str) -> bool:
        """Whether the worker tells what it holds."""
        return worker_id in self._replicas

    def replica(self, worker_id: str) -> CacheReplica | None:
        """Returns the copy of the worker's cache; None for an older or unknown worker."""
        return self._replicas.get(worker_id)

    def apply(self, worker_id: str, update: CacheUpdate, now: float) -> bool:
        """Takes in a worker's update. Returns whether to ask the worker for a snapshot."""
        replica = self._replicas.get(worker_id)
        return replica is not None and replica.apply(update, now)

    def expect(self, worker_id: str, blocks: PromptBlocks, capacity: int) -> None:
        """Records that a worker with room for `capacity` blocks was given the sequence. Only the
        estimate needs that.
        """
        if worker_id not in self._replicas:
            self._estimate.add(worker_id, blocks.hashes, capacity)

    def match(self, worker_id: str, blocks: PromptBlocks) -> int:
        """Returns the number of leading blocks of the sequence that the worker holds."""
        replica = self._replicas.get(worker_id)
        if replica is None:
            return self._estimate.match(worker_id, blocks.hashes)
        return replica.match(blocks.keys)

    def predict(
        self,
        worker_id: str,
        blocks: PromptBlocks,
        num_tokens: int,
        computing: Iterable[PromptBlocks],
    ) -> tuple[int, int]:
        """Returns how many of a sequence's `num_tokens` tokens the worker holds, and how many it
        will hold besides when it comes to the sequence, because the prompts that it is `computing`
        have them. The estimate includes these already.
        """
        # The last token is always computed, because its logits are needed.
        most = (num_tokens - 1) // blocks.block_size
        stored = min(self.match(worker_id, blocks), most)
        coming = 0
        if worker_id in self._replicas:
            coming = min(max((blocks.common(one) for one in computing), default=0), most)
        return stored * blocks.block_size, max(0, coming - stored) * blocks.block_size

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yields each worker that tells what it holds, with its number of blocks."""
        return ((worker_id, len(replica)) for worker_id, replica in self._replicas.items())

    @property
    def snapshots(self) -> int:
        """Snapshots since the start of the router."""
        return self._snapshots + sum(one.snapshots for one in self._replicas.values())

    @property
    def gaps(self) -> int:
        """Updates since the start that were missing or did not fit."""
        return self._gaps + sum(one.gaps for one in self._replicas.values())
