"""Chooses the KV memory of this worker for `kv.memory: auto`, when the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kvrelay.engine.model.loader import LoadedModel, weight_bytes
from kvrelay.models.model_json import read_config_json
from kvrelay.planning.auto_kv_memory import Room, activation_bytes, choose_kv_memory
from kvrelay.process.free_memory import available_bytes
from kvrelay.process.machine import Machine
from kvrelay.process.telemetry import get_logger
from kvrelay.types.kv_layout import KvLayout
from kvrelay.worker.runtime.draft_files import check_draft_files
from kvrelay.worker.runtime.settings import WorkerSettings

log = get_logger("worker")


@dataclass(frozen=True, slots=True)
class AutoMemory:
    """Returns KV bytes for a loaded model on this worker's device and host."""

    settings: WorkerSettings

    def __call__(self, loaded: LoadedModel, layout: KvLayout, longest: int) -> int:
        """Returns the bytes for KV of all ranks. longest: tokens of the longest sequence. Raises
        ConfigError if the memory does not hold one sequence.
        """
        config, pool = self.settings.config, self.settings.config.pool(self.settings.pool)
        degree, slots = pool.tensor_parallel, config.decode.max_batch
        model = read_config_json(Path(loaded.folder)) if loaded.folder else {}
        tokens = max(config.prefill.chunk_tokens, config.decode.chunk_tokens + slots)
        activations = activation_bytes(model, loaded.kv_dtype, tokens, slots)
        own = weight_bytes(loaded.model)
        device = loaded.model.device
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            # Workers with a part of a GPU share it.
            sharers = max(1, round(1 / pool.resources.num_gpus)) if pool.resources.num_gpus else 1
            room = Room(total, free, sharers, is_gpu=True)
        else:
            machine = Machine.here()
            room = Room(
                machine.memory_bytes,
                # The worker's own weights are in memory already, and not available.
                available_bytes(machine.memory_bytes),
                config.workers_on_host(machine.cores),
            )
        drafting = None
        if self.settings.pool == "decode":
            drafting = check_draft_files(config, self.settings.model_path)
        draft_bytes = 0 if drafting is None else drafting.num_bytes
        chosen = choose_kv_memory(
            room,
            # Each rank has its part of the layout on a device of its own; on a CPU, one host has
            # all parts.
            layout.share if device.type == "cuda" else layout,
            longest=longest,
            max_batch=slots,
            weight_bytes=own if device.type == "cuda" else own * degree,
            activation_bytes=activations,
            draft_bytes=draft_bytes,
            step_tokens=config.step_tokens(self.settings.pool),
        )
        ranks = layout.ranks if device.type == "cuda" else 1
        log.info(
            "kv_memory_chosen",
            worker=self.settings.worker_id,
            bytes=chosen.kv_bytes * ranks,
            limit=chosen.limit,
            memory_bytes=room.total,
            available_bytes=room.available,
            workers=room.workers,
            weight_bytes=chosen.weight_bytes,
            activation_bytes=chosen.activation_bytes,
            draft_bytes=draft_bytes,
        )
        return chosen.kv_bytes * ranks
