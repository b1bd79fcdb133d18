"""vLLM's KV events: what its prefix cache has stored and dropped. Used by the engine's thread."""

from __future__ import annotations

from typing import Any

from kvrelay.vllm_engine.cached_blocks import CacheChanges, StoredBlocks


class CacheEvents:
    """Collects the events of one scheduler, which has one group of blocks."""

    def __init__(self, scheduler: Any, block_size: int) -> None:
        from vllm.distributed.kv_events import BlockRemoved, BlockStored
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        self._kinds = BlockStored, BlockRemoved
        self._key = make_block_hash_with_group_id
        self._pool = scheduler.kv_cache_manager.block_pool
        self._block_size = block_size
        self._events: list[Any] = []
        self._publish = scheduler.kv_event_publisher.publish
        scheduler.kv_event_publisher.publish = self._take

    def _take(self, batch: Any) -> None:
        self._events += batch.events
        self._publish(batch)

    def changes(self) -> CacheChanges:
        """Returns what has changed since the last call.

        Events repeat a block that is found again, and one of several copies of a block may be
        dropped, so whether vLLM holds a block is looked up.
        """
        if not self._events:
            return CacheChanges()
        events, self._events = self._events, []
        stored_kind, removed_kind = self._kinds
        stored = tuple(self._stored(one) for one in events if isinstance(one, stored_kind))
        touched = {hash for one in stored for hash in one.hashes}
        for one in events:
            if isinstance(one, removed_kind):
                touched.update(one.block_hashes)
        return CacheChanges(stored, frozenset(hash for hash in touched if not self._holds(hash)))

    def _holds(self, hash: Any) -> bool:
        found = self._pool.cached_block_hash_to_block.get_one_block(self._key(hash, 0))
        return found is not None

    def _stored(self, event: Any) -> StoredBlocks:
        """Returns the event's blocks; none if their content is not that of tokens and a salt."""
        hashes, tokens = tuple(event.block_hashes), tuple(event.token_ids)
        keys = [key for one in event.extra_keys or () for key in one or ()]
        begins = event.parent_block_hash is None
        salt = keys[0] if begins and len(keys) == 1 and isinstance(keys[0], str) else ""
        if len(tokens) != len(hashes) * self._block_size or (keys and not salt):
            return StoredBlocks((), ())
        return StoredBlocks(hashes, tokens, event.parent_block_hash, salt)
