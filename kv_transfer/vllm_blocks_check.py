"""Checks what a commit says of blocks in the sender's vLLM, before this worker's vLLM acts on it.
Pure.
"""

from __future__ import annotations

import math
import re

from kvrelay.errors import DataLoss
from kvrelay.wire.transfer import VllmBlocks

# vLLM's ids: UUIDs, and names of kvrelay with a suffix of vLLM's.
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")
_MAX_BLOCK = 2**31 - 1
# Longest time, in seconds, that a sender can promise to keep blocks.
_MAX_HELD_S = 3600.0


def check_vllm_blocks(given: VllmBlocks, num_blocks: int) -> None:
    """Raises DataLoss unless the ids, the address, the times and the `num_blocks` blocks can be
    those of a vLLM engine. Block 0 is vLLM's placeholder and has no KV.
    """
    if not _ID.fullmatch(given.engine_id) or not _ID.fullmatch(given.request_id):
        raise _flaw("an id of its engine or request that is none of vLLM's")
    if not _HOST.fullmatch(given.host) or not 1 <= given.port <= 65535:
        raise _flaw(f"port {given.port} of a host {given.host!r:.60}, which is no address")
    if not (math.isfinite(given.expires_at) and 0 < given.held_s <= _MAX_HELD_S):
        raise _flaw(f"{given.held_s} s for which it keeps the blocks; allowed are 0 to 3600 s")
    if len(given.blocks) != num_blocks or len(set(given.blocks)) != num_blocks:
        raise _flaw(f"{len(set(given.blocks))} different blocks for {num_blocks} blocks of KV")
    if not all(0 < block <= _MAX_BLOCK for block in given.blocks):
        raise _flaw("a block number that is not one of vLLM's")


def _flaw(text: str) -> DataLoss:
    return DataLoss(f"the commit names {text}; the hand-off is rejected")
