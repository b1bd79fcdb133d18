"""Reads of KV from the memory of other workers' vLLM, by this worker's vLLM. Does not import vLLM.

    commit ──▶ expected ──▶ vLLM has room, and reads ──▶ finished: the receipt is sent
                   └──── the sequence ends ────▶ forgotten

The sender promises to keep the blocks until a deadline. A read that ends later may have seen other
KV, so vLLM computes the prompt instead.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from kv_transfer.lease import Lease
from kvrelay.clock import Clock
from kvrelay.errors import Cancelled
from kvrelay.wire.kv_frame import VllmBlocks
from kvrelay.worker.context import Key

# Seconds between the end of a read and the time from which blocks may change.
MARGIN_S = 1.0
# Seconds after the deadline in which vLLM has to give up a read.
_GRACE_S = 5.0


@dataclass(slots=True, eq=False)
class RemoteRead:
    """The KV of one sequence. During a step, only the engine's thread uses `tokens` and
    `failed`.
    """

    blocks: VllmBlocks
    # Tokens with KV.
    num_tokens: int
    # The latest end of the read, in monotonic seconds.
    deadline: float
    # Gets the number of blocks that were read.
    finished: asyncio.Future[int]
    # Tokens that vLLM reads: those that its prefix cache does not have.
    tokens: int = 0
    # vLLM computes the tokens instead.
    failed: bool = False
    # vLLM is reading.
    running: bool = False

    @property
    def params(self) -> dict[str, Any]:
        """vLLM's kv_transfer_params, with which it reads the blocks."""
        blocks = self.blocks
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": blocks.engine_id,
            "remote_request_id": blocks.request_id,
            "remote_host": blocks.host,
            "remote_port": blocks.port,
            "remote_block_ids": [list(blocks.blocks)],
            "remote_num_tokens": self.num_tokens,
            "remote_blocks_expiry_time": blocks.expires_at,
            "tp_size": 1,
        }


class RemoteReads:
    """Implements `kv_transfer.transports.vllm_nixl.VllmReads`. Lives on the worker's event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reads: dict[Key, RemoteRead] = {}

    def expect(self, lease: Lease, blocks: VllmBlocks) -> asyncio.Future[int]:
        """Remembers the read until `finish` or `forget`. Returns the number of blocks that were
        read; see `VllmReads`.
        """
        finished = asyncio.get_running_loop().create_future()
        deadline = self._clock.now() + blocks.held_s - MARGIN_S
        self._reads[lease.key] = RemoteRead(blocks, lease.num_tokens, deadline, finished)
        return finished

    def find(self, key: Key) -> RemoteRead | None:
        """The expected or running read of an attempt."""
        return self._reads.get(key)

    def finish(self, key: Key, num_blocks: int) -> None:
        """The sequence has its KV, of which `num_blocks` blocks were read."""
        read = self._reads.pop(key, None)
        if read is not None and not read.finished.done():
            read.finished.set_result(num_blocks)

    def forget(self, key: Key) -> None:
        """The sequence has ended. Does nothing if the read is over."""
        read = self._reads.pop(key, None)
        if read is not None and not read.finished.done():
            read.finished.set_exception(Cancelled("the sequence ended before its KV was read"))

    def overdue(self, now: float) -> list[Key]:
        """The attempts whose read has not ended although its result cannot be used any more."""
        return [
            key
            for key, read in self._reads.items()
            if read.running and now >= read.deadline + _GRACE_S
        ]
