"""What passes between kvrelay and the objects that vLLM constructs by itself: the sampler and the
hand-off connector.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvrelay.engine.sampling.sampler import Sampled
from kvrelay.errors import KvRelayError
from kvrelay.vllm_engine.block_copier import BlockCopier
from kvrelay.vllm_engine.nixl.remote_reads import RemoteRead
from kvrelay.worker.sequence import Sequence

# Key of the sequence's name in vLLM's SamplingParams.extra_args.
KEY = "kvrelay"


@dataclass(slots=True, eq=False)
class Exchanged:
    """One sequence in vLLM. During a step, only the engine's thread uses it."""

    sequence: Sequence
    eos_token_ids: frozenset[int]
    # The latest draw of the sampler.
    drawn: Sampled | KvRelayError | None = None
    # Leading tokens whose KV is in the sequence's staging blocks, to be loaded into vLLM's blocks.
    arrived_tokens: int = 0
    # Whether KV of the prompt is copied to the sequence's staging blocks.
    leaves: bool = False
    # Leading staging blocks that hold their KV.
    staged_blocks: int = 0
    # The KV that vLLM reads from another worker's vLLM.
    read: RemoteRead | None = None


class Exchange:
    """The sequences in vLLM, by name, and vLLM's KV caches by layer."""

    def __init__(self) -> None:
        self.sequences: dict[str, Exchanged] = {}
        # Tensors [blocks, ...] of the layers, in the model's order.
        self.kv_caches: dict[str, torch.Tensor] = {}
        # Copies blocks between vLLM's memory and the staging memory. None before the start.
        self.copier: BlockCopier | None = None
        # vLLM's requests whose blocks nobody will read. Both threads use it.
        self.released: deque[str] = deque()

    def of(self, extra_args: Mapping[str, Any] | None) -> Exchanged | None:
        """The sequence that a request of vLLM belongs to; None for a request of vLLM's own."""
        return self.sequences.get((extra_args or {}).get(KEY, ""))


EXCHANGE = Exchange()
"""The exchange of this process, which runs one engine."""
