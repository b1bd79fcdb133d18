"""The memory that each pool's workers will take, before any of them is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError, NotFound
from kvrelay.models import is_on_hub, local_folder, resolve_model
from kvrelay.models.model_files import check_model_files, has_weights
from kvrelay.models.model_json import read_model_json
from kvrelay.models.model_size import kv_layout, longest_sequence, model_dtype, weight_bytes
from kvrelay.types.workers import POOLS, PoolName


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
    # Tiers behind the KV cache: bytes of host memory, bytes of files, and their folder.
    host_tier_bytes: int = 0
    disk_tier_bytes: int = 0
    disk_tier_path: str = ""

    @property
    def kv_tokens(self) -> int:
        """Tokens for which there is KV memory."""
        return self.kv_bytes // self.block_bytes * self.block_size if self.block_bytes else 0

    @property
    def least_kv_bytes(self) -> int:
        """KV of one sequence of the greatest length."""
        return -(-self.longest_sequence // self.block_size) * self.block_bytes

    @property
    def sequences(self) -> int:
        """Sequences of the greatest length for which there is KV memory."""
        return self.kv_bytes // self.least_kv_bytes if self.least_kv_bytes else 0


def plan_memory(config: ClusterConfig) -> tuple[PoolMemory, ...]:
    """Returns the memory of each pool. Raises ConfigError if there is no such model, and
    ModelRefused for damaged files.

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
    file = folder / "config.json"
    model = read_model_json(file) if file.is_file() else {}
    dtype = model_dtype(model, config.model.dtype)
    longest = longest_sequence(model, config.model.max_model_len)

    def of(pool: PoolName) -> PoolMemory:
        kv, section = config.pool_kv(pool), config.pool(pool)
        packs = not section.resources.num_gpus and section.tensor_parallel == 1
        weights = tensors and weight_bytes(tensors, dtype, section.weights, packs=packs)
        layout = kv_layout(model, kv.block_size, kv.dtype, dtype) if longest else None
        block_bytes = layout.block_bytes if layout else 0
        tiers = {one.kind: one for one in kv.tiers}
        host, disk = tiers.get("host"), tiers.get("disk")
        return PoolMemory(
            pool,
            section.replicas,
            weights or None,
            kv.memory,
            block_bytes,
            kv.block_size,
            longest or 0,
            0 if host is None else host.size,
            0 if disk is None else disk.size,
            "" if disk is None else disk.path,
        )

    return tuple(map(of, POOLS))
