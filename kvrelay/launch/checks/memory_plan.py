"""The memory that each pool's workers will take, before any of them is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kvrelay.config.pools import DecodeConfig, PrefillConfig
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError, NotFound
from kvrelay.models import is_on_hub, local_folder, resolve_model
from kvrelay.models.model_files import check_model_files, has_weights
from kvrelay.models.model_json import read_config_json
from kvrelay.models.model_size import kv_layout, longest_sequence, model_dtype, weight_bytes
from kvrelay.planning.auto_kv_memory import (
    PROCESS_BYTES,
    AutoKv,
    Room,
    activation_bytes,
    choose_kv_memory,
)
from kvrelay.process.free_memory import available_bytes
from kvrelay.process.machine import Machine
from kvrelay.types.kv_layout import KvLayout, check_dtype
from kvrelay.types.workers import POOLS, PoolName
from kvrelay.vllm_engine.arguments import staging_bytes
from kvrelay.worker.runtime.draft_files import check_draft_files


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """The memory of one pool's workers, each value of one worker. None and 0 are unknown before the
    model is loaded.
    """

    pool: PoolName
    workers: int
    # None for a model that is not downloaded yet.
    weight_bytes: int | None
    kv_bytes: int
    # Bytes and tokens of a block.
    block_bytes: int
    block_size: int
    # Tokens of the longest sequence that a request may have.
    longest_sequence: int
    # Why `kv.memory: auto` chooses these bytes, or why they are unknown. Empty for a size.
    auto: str = ""
    # Tiers behind the KV cache: bytes of host memory, bytes of files, and their folder; stores.
    host_tier_bytes: int = 0
    disk_tier_bytes: int = 0
    disk_tier_path: str = ""
    stores: tuple[str, ...] = ()
    # Weights, as far as they are known, and KV of the draft model.
    draft_weight_bytes: int = 0
    draft_kv_bytes: int = 0
    # Part of `weight_bytes`: the copy of shared embeddings that the CPU kernels read as the head.
    head_copy_bytes: int = 0
    # KV of the longest sequence, if its layout is known.
    sequence_kv_bytes: int = 0
    # Part of `kv_bytes`: what holds KV on its way between workers on vLLM.
    staging_bytes: int = 0

    @property
    def kv_tokens(self) -> int:
        """Tokens for which there is KV memory, in sequences of the greatest length."""
        if not self.block_bytes:
            return 0
        if self.least_kv_bytes < self._whole_sequence_bytes:
            return int(self.cache_bytes / self.least_kv_bytes * self.longest_sequence)
        return self.cache_bytes // self.block_bytes * self.block_size

    @property
    def cache_bytes(self) -> int:
        """KV memory of the engine itself."""
        return self.kv_bytes - self.staging_bytes

    @property
    def worker_bytes(self) -> int:
        """Weights, KV, draft model and host tier, without the process itself."""
        weights = (self.weight_bytes or 0) + self.draft_weight_bytes
        return self.kv_bytes + self.draft_kv_bytes + weights + self.host_tier_bytes

    @property
    def least_kv_bytes(self) -> int:
        """KV of one sequence of the greatest length."""
        return self.sequence_kv_bytes or self._whole_sequence_bytes

    @property
    def _whole_sequence_bytes(self) -> int:
        return -(-self.longest_sequence // self.block_size) * self.block_bytes

    @property
    def sequences(self) -> int:
        """Sequences of the greatest length for which there is KV memory."""
        return self.cache_bytes // self.least_kv_bytes if self.least_kv_bytes else 0


def plan_memory(config: ClusterConfig, machine: Machine | None = None) -> tuple[PoolMemory, ...]:
    """Returns the memory of each pool. machine: the one that the workers run on, for `kv.memory:
    auto`; None if it is unknown.

    Raises ConfigError if there is no such model, the draft model does not fit the model or `auto`
    leaves too little for a sequence, and ModelRefused for damaged files.

    The KV of models with unusual layers is unknown here: the worker computes it from the loaded
    model.
    """
    try:
        resolved = resolve_model(config.model.path)
        folder = Path(local_folder(resolved))
    except NotFound as error:
        raise ConfigError(f"model.path: {error.message}") from None
    # The weights of a hub model may not be downloaded yet.
    is_here = not is_on_hub(resolved) or has_weights(folder)
    tensors = check_model_files(folder) if is_here else None
    model = read_config_json(folder)
    dtype = model_dtype(model, config.model.dtype)
    longest = longest_sequence(model, config.model.max_model_len)
    wanted = config.model.max_model_len
    if longest is not None and wanted is not None and wanted > longest:
        raise ConfigError(
            f"model.max_model_len: {wanted} is more than the {longest} tokens of the model's "
            "context; set it to that or less, or leave it out"
        )
    drafting = check_draft_files(config, resolved)

    def of(pool: PoolName) -> PoolMemory:
        kv, section = config.pool_kv(pool), config.pool(pool)
        packs = (
            section.engine == "native"
            and not section.resources.num_gpus
            and section.tensor_parallel == 1
        )
        packed_bytes = weight_bytes(tensors or (), dtype, section.weights, packs=packs)
        model_bytes = weight_bytes(tensors or (), dtype, section.weights, packs=False)
        layout = (
            kv_layout(
                model,
                kv.block_size,
                kv.dtype,
                dtype,
                latents=config.keeps_latents,
                windows_below=0 if config.whole_windows else longest,
            )
            if longest
            else None
        )
        check_dtype(kv.dtype, layout.layers if layout else ())
        tiers = {one.kind: one for one in kv.tiers}
        host, disk, remote = tiers.get("host"), tiers.get("disk"), tiers.get("remote")
        found = PoolMemory(
            pool,
            section.replicas,
            packed_bytes or None,
            0,
            layout.block_bytes if layout else 0,
            kv.block_size,
            longest or 0,
            host_tier_bytes=0 if host is None else host.size_bytes,
            disk_tier_bytes=0 if disk is None else disk.size_bytes,
            disk_tier_path="" if disk is None else disk.path,
            stores=() if remote is None else remote.addresses,
            draft_weight_bytes=drafting.weight_bytes if drafting and pool == "decode" else 0,
            draft_kv_bytes=drafting.kv_bytes if drafting and pool == "decode" else 0,
            head_copy_bytes=packed_bytes - model_bytes,
            sequence_kv_bytes=(
                layout.sequence_bytes(longest or 0, config.step_tokens(pool)) if layout else 0
            ),
        )
        if kv.memory != "auto":
            staging = staging_bytes(config, pool) if section.engine == "vllm" else 0
            return replace(found, kv_bytes=kv.memory, staging_bytes=staging)
        if unknown := _unknown(found, section, machine):
            return replace(
                found, auto=f"the worker chooses when it has loaded the model: {unknown}"
            )
        assert machine is not None
        assert layout is not None
        chosen = _choose(config, machine, found, layout, activations)
        return replace(found, kv_bytes=chosen.kv_bytes, auto=chosen.reason)

    slots = config.decode.max_batch
    tokens = max(config.prefill.chunk_tokens, config.decode.chunk_tokens + slots)
    activations = activation_bytes(model, dtype, tokens, slots)
    return tuple(map(of, POOLS))


def _unknown(
    found: PoolMemory, section: PrefillConfig | DecodeConfig, machine: Machine | None
) -> str:
    """Returns what is not known before the worker starts, or an empty text."""
    if machine is None:
        return "its host is not known"
    if section.resources.num_gpus:
        return "the memory of its GPU is not known"
    if not found.block_bytes:
        return "the layers are unusual"
    return "" if found.weight_bytes is not None else "the weights are not downloaded"


def _choose(
    config: ClusterConfig, machine: Machine, found: PoolMemory, layout: KvLayout, activations: int
) -> AutoKv:
    workers = config.workers_on_host(machine.cores)
    # A worker chooses when the weights are loaded.
    loaded = workers * ((found.weight_bytes or 0) + PROCESS_BYTES + found.host_tier_bytes)
    available = max(0, available_bytes(machine.memory_bytes) - loaded)
    room = Room(machine.memory_bytes, available, workers)
    return choose_kv_memory(
        room,
        layout,
        longest=found.longest_sequence,
        max_batch=config.decode.max_batch,
        weight_bytes=found.weight_bytes or 0,
        activation_bytes=activations,
        draft_bytes=found.draft_weight_bytes + found.draft_kv_bytes,
        step_tokens=config.step_tokens(found.pool),
    )
