"""What a worker's sessions, heartbeats and hand-offs need to know of its engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kv_transfer.blocks.arena import Arena
from kvrelay.engine.model.adapter_table import AdapterTable
from kvrelay.engine.sampling.compiled_grammars import Grammars
from kvrelay.types.kv_layout import KvLayout


class ServedModel(Protocol):
    """A loaded model. `ModelRunner` is the one of the native engine.

    `kv` is the memory that hand-offs read and write, in blocks of `layout`. Workers with equal
    `model_id` and `layout_hash` can exchange its bytes.
    """

    layout: KvLayout
    model_id: str
    # The id that workers of protocol 0 give the model.
    sampled_model_id: str
    # Hash of the files that define the vocabulary.
    tokenizer_id: str
    layout_hash: str
    # Tokens.
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    grammars: Grammars
    adapters: AdapterTable
    weight_bytes: int
    kv_bytes: int

    @property
    def kv(self) -> Arena:
        """The memory of the hand-offs."""
        ...

    @property
    def engine(self) -> str:
        """Describes the engine, for operators."""
        ...

    @property
    def rank_pids(self) -> Sequence[int]:
        """Process ids of the other ranks."""
        ...

    def lost(self) -> str:
        """The reason why no step can run any more; empty while steps can run."""
        ...

    def kill_ranks(self) -> None:
        """Kills the other ranks."""
        ...

    def close(self) -> None:
        """Releases the memory. No step may be running."""
        ...
