"""A model that vLLM serves, as the rest of the worker sees it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.model.adapter_table import AdapterTable
from kvrelay.engine.model.checkpoint import Checkpoint
from kvrelay.engine.sampling.compiled_grammars import Grammars
from kvrelay.errors import ConfigError, ModelRefused
from kvrelay.models.model_identity import tokenizer_id
from kvrelay.types.kv_layout import KvLayout, LayerKv
from kvrelay.vllm_engine.block_copier import BlockCopier, layout_of
from kvrelay.vllm_engine.engine import VllmEngine
from kvrelay.vllm_engine.exchange import EXCHANGE

_WITHOUT_ADAPTERS = "adapters run on the native engine; set engine: native"


class VllmModel:
    """Implements `kvrelay.worker.served_model.ServedModel`. `kv` is the staging memory."""

    def __init__(
        self, engine: VllmEngine, checkpoint: Checkpoint, block_size: int, staging_bytes: int
    ) -> None:
        """Makes the staging memory; there is none if staging_bytes is 0. Raises ConfigError if it
        cannot hold one sequence.
        """
        self._engine = engine
        self.max_model_len = engine.max_model_len
        self.vocab_size = engine.vocab_size
        self.eos_token_ids = engine.eos_token_ids
        folder = checkpoint.folder
        self.tokenizer_id = tokenizer_id(Path(folder))
        self.grammars = Grammars(str(folder), self.vocab_size, self.eos_token_ids)
        self.adapters = AdapterTable(None, 0, native=False, refused=_WITHOUT_ADAPTERS)
        # Why KV cannot be handed over; empty if it can.
        groups = [one.kv_cache_spec for one in engine.kv_cache_config.kv_cache_groups]
        self.without_handoff = why_not_handed_over(groups, block_size)
        self.layout = KvLayout((LayerKv(1, 1, 1),), block_size, "float32")
        if not self.without_handoff:
            try:
                num_blocks = engine.kv_cache_config.num_blocks
                self.layout = layout_of(EXCHANGE.kv_caches, num_blocks, block_size)
            except ModelRefused as error:
                self.without_handoff = error.message
        self.model_id = self._id(checkpoint.model_id)
        self.sampled_model_id = self._id(checkpoint.sampled_model_id)
        self.layout_hash = self.layout.hash(self.model_id)
        self.kv = self._staging(staging_bytes)
        storages = [one.untyped_storage() for one in EXCHANGE.kv_caches.values()]
        # Layers may share one storage.
        self.kv_bytes = self.layout.arena_bytes(self.kv.num_blocks) + sum(
            {one.data_ptr(): one.nbytes() for one in storages}.values()
        )
        # Of the files: vLLM may keep packed weights that its parameters do not show.
        self.weight_bytes = sum(path.stat().st_size for path in checkpoint.weights)

    def _id(self, model_id: str) -> str:
        """The id of the model under this engine. Workers with equal ids give equal tokens and can
        exchange blocks: it includes the release, the numbers' types and the attention kernels.
        """
        config = self._engine.config
        kernels = sorted(
            {
                str(getattr(layer, "isa", type(getattr(layer, "impl", layer)).__name__))
                for layer in config.compilation_config.static_forward_context.values()
            }
        )
        facts = (
            model_id,
            "vllm",
            self._engine.version,
            str(config.model_config.dtype),
            str(config.cache_config.cache_dtype),
            str(config.model_config.quantization),
            *kernels,
        )
        return xxhash.xxh3_128("|".join(facts).encode()).hexdigest()

    def _staging(self, num_bytes: int) -> KvPool:
        if self.without_handoff or not num_bytes:
            return KvPool(self.layout, 1)
        needed = self.layout.blocks_for(self.max_model_len)
        blocks = num_bytes // self.layout.block_bytes
        if blocks < needed:
            raise ConfigError(
                f"kv.memory: {num_bytes} bytes for KV on its way between workers do not hold one "
                f"sequence of model.max_model_len = {self.max_model_len} tokens, which takes "
                f"{needed * self.layout.block_bytes} bytes; set kv.memory to at least "
                f"{needed * self.layout.block_bytes * 4}, of which a quarter is for that, or "
                "model.max_model_len lower"
            )
        pool = KvPool(self.layout, blocks)
        EXCHANGE.copier = BlockCopier(EXCHANGE.kv_caches, pool)
        return pool

    @property
    def engine(self) -> str:
        """Describes the engine, for operators."""
        config = self._engine.config
        weights = config.model_config.quantization or str(config.model_config.dtype)
        return (
            f"vLLM {self._engine.version}, weights {weights.removeprefix('torch.')}, "
            f"KV {self.layout.dtype if EXCHANGE.kv_caches else 'none'}"
        )

    @property
    def rank_pids(self) -> Sequence[int]:
        """Empty: the engine runs in this process."""
        return ()

    def lost(self) -> str:
        """Empty: the engine ends with this process."""
        return ""

    def kill_ranks(self) -> None:
        """Does nothing: there are no other ranks."""

    def close(self) -> None:
        """Ends the engine and releases the staging memory."""
        self.grammars.close()
        self._engine.close()
        EXCHANGE.copier = None
        self.kv.close()


def why_not_handed_over(groups: Sequence[Any], block_size: int) -> str:
    """Returns why the KV of a model cannot be handed over, as a clause; empty if it can. groups:
    vLLM's KVCacheSpec of each group of layers.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    # Not their subclasses, whose blocks hold more than the KV of their own tokens.
    if len(groups) != 1 or type(groups[0]) not in (FullAttentionSpec, MLAAttentionSpec):
        kinds = ", ".join(type(one).__name__ for one in groups) or "none"
        return (
            f"its layers have KV blocks of the kinds {kinds}, and only FullAttentionSpec or "
            "MLAAttentionSpec for all layers is supported"
        )
    (spec,) = groups
    if spec.non_causal:
        return "its tokens attend to later tokens of the prompt, which may be in another chunk"
    if spec.block_size != block_size:
        return f"vLLM's blocks have {spec.block_size} tokens, and kv.block_size is {block_size}"
    return ""
