"""The KV memory of a worker whose configuration says `kv.memory: auto`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.errors import ConfigError, ModelRefused
from kvrelay.models.model_shape import model_shape
from kvrelay.planning.model_memory import ModelMemory
from kvrelay.planning.quantity import size
from kvrelay.types.kv_layout import DTYPE_BYTES, KvLayout

# Share of a host's or a GPU's memory that all workers together may plan with. The rest is for the
# page cache, other programs and fragmentation.
HOST_SHARE = 0.8
GPU_SHARE = 0.9
# Share of the memory that is free at the start.
_AVAILABLE_SHARE = 0.8
# Router, controller, Redis and Ray of one machine; a smaller machine gives a part of its memory.
_CLUSTER_BYTES = 2**30
_CLUSTER_SHARE = 0.15
# A process of a worker without weights and KV.
PROCESS_BYTES = 400 * 2**20
# Activations of a model whose sizes config.json does not tell.
_UNKNOWN_ACTIVATIONS = 256 * 2**20
# KV of this many times a full batch of the longest sequences leaves room for prefix caches; more
# is of little use.
_FULL_BATCHES = 2
# The engine keeps a few hundred bytes for each block.
_MAX_BLOCKS = 2**18


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that one worker may use, in bytes."""

    # Of the host, or of one GPU.
    total: int
    # Not in use by anything when the workers have loaded their weights.
    available: int
    # Workers that share the memory.
    workers: int
    is_gpu: bool = False

    def for_kv(self, weights: int, activations: int) -> int:
        """Returns the bytes of one worker that are left for KV; below 0 if there are none.

        Each worker has an equal share. The available memory bounds the share: a machine may run
        other programs.
        """
        if self.is_gpu:
            share = int(GPU_SHARE * self.total) // self.workers
            return min(share - weights, int(GPU_SHARE * self.available)) - activations
        cluster = min(_CLUSTER_BYTES, int(_CLUSTER_SHARE * self.total))
        share = (int(HOST_SHARE * self.total) - cluster) // self.workers
        free = int(_AVAILABLE_SHARE * self.available) // self.workers
        return min(share - weights - PROCESS_BYTES, free) - activations


@dataclass(frozen=True, slots=True)
class AutoKv:
    """The KV memory that was chosen, and why."""

    kv_bytes: int
    # memory: all that is left. batch: what a full batch and its prefixes can use. blocks: the most
    # blocks of one worker.
    limit: str
    room: Room
    weight_bytes: int
    activation_bytes: int
    # Weights and KV of the draft model.
    draft_bytes: int = 0

    @property
    def reason(self) -> str:
        """The choice in one sentence, with figures."""
        what = "GPU" if self.room.is_gpu else "host"
        told = {
            "memory": "all that is left of its share",
            "batch": f"{_FULL_BATCHES} full batches of the longest sequences",
            "blocks": f"{_MAX_BLOCKS:,} blocks",
        }[self.limit]
        return (
            f"{size(self.kv_bytes)}: {told}; the {what} has {size(self.room.total)}, "
            f"{size(self.room.available)} of it free, for {self.room.workers} "
            f"{'worker' if self.room.workers == 1 else 'workers'} with {size(self.weight_bytes)} "
            f"of weights and {size(self.activation_bytes)} of activations each"
            + (f", and {size(self.draft_bytes)} for the draft model" if self.draft_bytes else "")
        )


def choose_kv_memory(
    room: Room,
    layout: KvLayout,
    *,
    longest: int,
    max_batch: int,
    weight_bytes: int,
    activation_bytes: int,
    draft_bytes: int = 0,
    step_tokens: int = 0,
) -> AutoKv:
    """Returns the KV memory of a worker: what its share of the memory leaves, up to what a full
    batch can use.

    longest: tokens of the longest sequence. max_batch: batch slots of a decode worker. draft_bytes:
    weights and KV of the draft model, which is loaded later. step_tokens: the most new tokens of a
    sequence in a step, for layouts with windows. Raises ConfigError if the memory does not hold one
    sequence.
    """
    block = layout.block_bytes
    left = room.for_kv(weight_bytes, activation_bytes + draft_bytes)
    sequence = layout.sequence_bytes(longest, step_tokens)
    limits = {
        "memory": left // block * block,
        "batch": _FULL_BATCHES * max(1, max_batch) * sequence,
        "blocks": max(_MAX_BLOCKS * block, sequence),
    }
    limit = min(limits, key=lambda name: limits[name])
    if limits[limit] < sequence:
        what = "GPU" if room.is_gpu else "host"
        raise ConfigError(
            f"kv.memory: auto leaves {size(max(0, left))} for KV, and one sequence of "
            f"model.max_model_len = {longest} tokens takes {size(sequence)}; the {what} has "
            f"{size(room.total)}, {size(room.available)} of it free, for {room.workers} workers "
            f"with {size(weight_bytes)} of weights each; lower model.max_model_len or the number "
            "of workers, or set kv.memory to a size"
        )
    return AutoKv(limits[limit], limit, room, weight_bytes, activation_bytes, draft_bytes)


def activation_bytes(model: Mapping[str, Any], dtype: str, tokens: int, rows: int) -> int:
    """Returns the bytes of activations of the largest step. model: the content of config.json.
    dtype: in which the model computes. rows: of the logits.
    """
    try:
        memory = ModelMemory(model_shape(model), 0.0, dtype, "")
    except ModelRefused:
        return _UNKNOWN_ACTIVATIONS
    return int(memory.activation_bytes(tokens, rows) * DTYPE_BYTES[dtype] / 2)
