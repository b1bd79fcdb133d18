"""Runs a model: one ragged forward pass per step over paged KV, then sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrelay.engine.attention import RaggedBatch, SequencePart
from kvrelay.engine.kv import KvPool
from kvrelay.engine.loader import LoadedModel, load_model
from kvrelay.engine.sampling import Sampled, SampleRequest, sample
from kvrelay.errors import ConfigError, InvalidArgument
from kvrelay.types import KvLayout


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive new tokens of one sequence, the first at position `start`; KV of all before is in `blocks`.

    `blocks` is the sequence's block table and reaches at least to the last new token. With `sample`, a token is drawn
    from the logits after the last one.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: SampleRequest | None = None


class ModelRunner:
    """One model and its KV memory. Owned by one thread; calls do not overlap."""

    def __init__(self, loaded: LoadedModel, layout: KvLayout, kv: KvPool, max_model_len: int) -> None:
        self.layout = layout
        self.kv = kv
        self.num_blocks = kv.num_blocks
        self.model_id = loaded.model_id
        self.layout_hash = layout.hash(loaded.model_id)
        self.max_model_len = max_model_len
        self.eos_token_ids = loaded.eos_token_ids
        self.vocab_size = loaded.vocab_size
        self.weight_bytes = loaded.weight_bytes
        self.kv_bytes = layout.arena_bytes(kv.num_blocks)
        self._model = loaded.model
        self._device = loaded.model.device

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str = "auto",
        block_size: int = 16,
        kv_bytes: int,
        max_model_len: int | None = None,
        device: str = "cpu",
        threads: int | None = None,
    ) -> ModelRunner:
        """Loads the model and takes up to `kv_bytes` for KV. `threads` is set for the whole process.

        max_model_len is cut to what the model allows. Raises ModelRefused, and ConfigError if `kv_bytes` does not hold
        one sequence of max_model_len tokens.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        loaded = load_model(path, dtype=dtype, device=device)
        longest = min(max_model_len or loaded.max_model_len, loaded.max_model_len)
        layout = KvLayout(loaded.kv_layers, block_size, loaded.kv_dtype)
        needed = layout.blocks_for(longest) * layout.block_bytes
        if kv_bytes < needed:
            raise ConfigError(
                f"kv.memory: {kv_bytes} bytes do not hold one sequence of model.max_model_len = {longest} tokens, "
                f"which takes {needed} bytes; set kv.memory to at least that, or model.max_model_len to at most "
                f"{kv_bytes // layout.block_bytes * block_size}"
            )
        return cls(loaded, layout, KvPool(layout, kv_bytes // layout.block_bytes, device), longest)

    @torch.inference_mode()
    def run(self, segments: Sequence[Segment]) -> list[Sampled | None]:
        """One forward pass over all segments; for each the sampled token, or None where none was asked for.

        Raises InvalidArgument, before anything is computed, for tokens, positions or blocks out of range.
        """
        if not segments:
            return []
        for segment in segments:
            self._check(segment)
        token_ids = [token for segment in segments for token in segment.token_ids]
        positions = [p for s in segments for p in range(s.start, s.start + len(s.token_ids))]
        batch = self._batch(segments)
        sampling = [(i, segment.sample) for i, segment in enumerate(segments) if segment.sample is not None]
        rows = [batch.parts[i].row + batch.parts[i].new - 1 for i, _ in sampling]
        output = self._model(
            input_ids=self._tensor(token_ids)[None],
            position_ids=self._tensor(positions)[None],
            use_cache=False,
            logits_to_keep=self._tensor(rows),
            ragged_batch=batch,
        )
        results: list[Sampled | None] = [None] * len(segments)
        for (i, _), sampled in zip(sampling, sample(output.logits[0], [r for _, r in sampling]), strict=True):
            results[i] = sampled
        return results

    def close(self) -> None:
        self.kv.close()

    def _batch(self, segments: Sequence[Segment]) -> RaggedBatch:
        size = self.layout.block_size
        parts = []
        slots: list[int] = []
        for segment in segments:
            end = segment.start + len(segment.token_ids)
            blocks = list(segment.blocks[: self.layout.blocks_for(end)])
            is_run = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
            parts.append(
                SequencePart(
                    row=len(slots),
                    new=len(segment.token_ids),
                    past=segment.start,
                    blocks=self._tensor(blocks),
                    first_block=blocks[0] if is_run else None,
                )
            )
            slots += [blocks[p // size] * size + p % size for p in range(segment.start, end)]
        return RaggedBatch(self.kv, self._tensor(slots), parts)

    def _check(self, segment: Segment) -> None:
        end = segment.start + len(segment.token_ids)
        needed = self.layout.blocks_for(end)
        if not segment.token_ids or segment.start < 0 or end > self.max_model_len:
            raise InvalidArgument(
                f"a segment of tokens {segment.start} to {end} is outside of 0 to {self.max_model_len}, or empty"
            )
        if not 0 <= min(segment.token_ids) <= max(segment.token_ids) < self.vocab_size:
            raise InvalidArgument(f"a token id is outside of 0 to {self.vocab_size - 1}", field="token_ids")
        if len(segment.blocks) < needed:
            raise InvalidArgument(f"{end} tokens need {needed} blocks, the table has {len(segment.blocks)}")
        if not 0 <= min(segment.blocks) <= max(segment.blocks) < self.num_blocks:
            raise InvalidArgument(f"a block is outside of 0 to {self.num_blocks - 1}")
        if segment.sample is not None:
            assert len(segment.sample.token_ids) == end, "a token is drawn after the last one of the sequence"
            if not all(0 <= token < self.vocab_size for token, _ in segment.sample.params.logit_bias):
                raise InvalidArgument(f"a token id is outside of 0 to {self.vocab_size - 1}", field="logit_bias")

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)
