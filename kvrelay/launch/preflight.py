"""Checks that a cluster can run on this machine, before any process is started."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvrelay.config.listen import ENDPOINTS
from kvrelay.config.schema import ClusterConfig
from kvrelay.config.tokens_file import load_tokens
from kvrelay.errors import ConfigError, NotFound, Unavailable
from kvrelay.models import local_folder, resolve_model
from kvrelay.models.model_files import check_model_files
from kvrelay.models.model_json import read_model_json
from kvrelay.process.owned_folder import SHORT_PARENT
from kvrelay.security.credentials import Credentials
from kvrelay.types.workers import POOLS

# For the logs and sockets of a start.
_ROOM_BYTES = 32 * 2**20
# Files in /dev, of the drivers that Ray supports.
_GPU_DEVICES = ("nvidia[0-9]*", "nvidiactl", "dxg", "kfd", "accel*")
# Ray's object store, and the segments of the transport shm.
_SHARED_MEMORY = Path("/dev/shm")
# Keys of models whose KV has other sizes than heads times dimension.
_LATENT = {
    "global_head_dim",
    "kv_lora_rank",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "v_head_dim",
}
# The least that a worker takes: a Python process with torch, without weights and KV.
_WORKER_BYTES = 128 * 2**20
_DTYPE_BYTES = {"float32": 4, "int8": 1}
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check_machine(config: ClusterConfig, *, is_local: bool) -> None:
    """Raises a KvRelayError that says what is wrong and what to do.

    is_local: the workers run on this machine only. Otherwise, the resources of the workers are
    checked where they start.
    """
    if config.security.tokens_file is not None:
        load_tokens(Path(config.security.tokens_file))
    Credentials.internal(config.security, "router")
    Credentials.public(config.security)
    weights = _model_bytes(config)
    _check_kv(config)
    _check_ports(config)
    _check_room(Path(_temporary_folder()), "set TMPDIR to another folder")
    if is_local:
        Credentials.internal(config.security, "worker")
        _check_room(SHORT_PARENT, "Ray keeps its sockets and logs there")
        check_shared_memory(_SHARED_MEMORY)
        _check_pools(config, memory_bytes())
        _check_memory(config, weights, memory_bytes())
        _check_gpus(config)


def _model_bytes(config: ClusterConfig) -> int:
    try:
        folder = local_folder(resolve_model(config.model.path))
    except NotFound as error:
        raise ConfigError(f"model.path: {error.message}") from None
    if Path(config.model.path).is_dir():
        return check_model_files(Path(folder))
    # A hub model, whose weights may not be downloaded yet.
    return 0


def _check_kv(config: ClusterConfig) -> None:
    """Raises ConfigError if a pool's KV memory cannot hold one sequence. The worker checks exactly,
    when it has loaded the model; this check is faster and covers common architectures.
    """
    folder = Path(local_folder(resolve_model(config.model.path)))
    if not (folder / "config.json").is_file():
        return
    model = read_model_json(folder / "config.json")
    for pool in POOLS:
        kv = config.pool_kv(pool)
        limit = config.model.max_model_len
        dtype = kv.dtype if kv.dtype != "auto" else config.model.dtype
        needed, tokens = least_kv_bytes(model, limit, kv.block_size, dtype)
        if config.pool(pool).replicas and kv.memory < needed:
            raise ConfigError(
                f"kv.memory: {kv.memory} bytes of a {pool} worker do not hold one sequence of "
                f"model.max_model_len = {tokens} tokens, which takes {needed} bytes; set kv.memory "
                "to at least that, or model.max_model_len lower"
            )


def least_kv_bytes(
    model: Mapping[str, Any], max_model_len: int | None, block_size: int, dtype: str
) -> tuple[int, int]:
    """Returns the bytes of KV that one sequence of the longest allowed length takes at least, and
    that length in tokens. Returns (0, 0) for a model configuration without the usual keys.

    model: the content of config.json. dtype: of the KV; auto is the dtype of the model.
    """
    heads: Any = model.get("num_key_value_heads")
    sizes = [model.get("num_hidden_layers"), heads, model.get("max_position_embeddings")]
    dim: Any = model.get("head_dim")
    if dim is None:
        sizes += [model.get("hidden_size"), model.get("num_attention_heads")]
    else:
        sizes.append(dim)
    limits = [limit for limit in (max_model_len, *_longrope_limits(model)) if limit is not None]
    if not all(type(size) is int and size > 0 for size in sizes + limits) or _LATENT & model.keys():
        return 0, 0
    if dim is None:
        dim = model["hidden_size"] // model["num_attention_heads"]
    if dtype == "auto":
        dtype = str(model.get("dtype") or model.get("torch_dtype"))
    tokens: int = min([model["max_position_embeddings"], *limits])
    blocks = -(-tokens // block_size)
    layers: int = model["num_hidden_layers"]
    values = 2 * layers * heads * dim * block_size * blocks
    return values * _DTYPE_BYTES.get(dtype, 2), tokens


def _longrope_limits(model: Mapping[str, Any]) -> list[Any]:
    """Returns the lengths at which the frequencies of LongRoPE change, where the engine ends."""
    ropes = [
        rope
        for rope in (model.get("rope_scaling"), model.get("rope_parameters"))
        if isinstance(rope, dict)
    ]
    types = [rope.get(key) for rope in ropes for key in ("rope_type", "type")]
    if "longrope" not in types and "su" not in types:
        return []
    return [one.get("original_max_position_embeddings") for one in (model, *ropes)]


def check_shared_memory(folder: Path) -> None:
    """Raises Unavailable if no file can be written in the folder of shared memory."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="kvrelay-") as file:
            os.posix_fallocate(file.fileno(), 0, os.sysconf("SC_PAGE_SIZE"))
    except OSError as error:
        raise Unavailable(
            f"{folder} cannot be written to: {error.strerror or error}; Ray keeps its object store "
            "there: mount it with write access, in a container for instance with --shm-size=1g"
        ) from None


def _check_pools(config: ClusterConfig, total: int) -> None:
    """Raises ConfigError if the processes of the workers alone exceed the memory."""
    wanted = sum(config.pool(pool).replicas for pool in POOLS)
    most = max(2, total // _WORKER_BYTES)
    if wanted > most:
        raise ConfigError(
            f"prefill.replicas and decode.replicas: {wanted} workers are more than this machine "
            f"can run; its {_gib(total)} of memory allow at most {most}, since each process takes "
            f"at least {_WORKER_BYTES >> 20} MiB; lower --prefill and --decode"
        )


def _check_ports(config: ClusterConfig) -> None:
    """Checks that each address is free and configured only once."""
    with contextlib.ExitStack() as held:
        for endpoint in ENDPOINTS:
            address: str = getattr(config.listen, endpoint)
            host, _, port = address.rpartition(":")
            try:
                held.enter_context(_bound(host.strip("[]"), int(port)))
            except OSError as error:
                reason = error.strerror or str(error)
                raise ConfigError(
                    f"listen.{endpoint}: cannot listen on {address}: {reason}; end the process "
                    f"that listens there, or set --{endpoint}-port to a free port or to 0"
                ) from None


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[None]:
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        # With SO_REUSEADDR, two sockets can bind an address, but only one can listen.
        listener.listen(1)
        yield


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise ConfigError(
            f"TMPDIR: {error.strerror}; set TMPDIR to a folder with write access"
        ) from None


def _check_room(folder: Path, hint: str) -> None:
    """Raises Unavailable if the folder has no room for the files of a start."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="kvrelay-") as file:
            os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)
    except OSError as error:
        reason = error.strerror or str(error)
        raise Unavailable(
            f"{folder} has no room for {_ROOM_BYTES >> 20} MiB of a cluster's files: {reason}; "
            f"free disk space there; {hint}"
        ) from None


def _check_memory(config: ClusterConfig, weights: int, total: int) -> None:
    """Checks that each worker fits by itself. How many workers fit together depends on how full
    their caches are.
    """
    for pool in POOLS:
        section, kv = config.pool(pool), config.pool_kv(pool).memory
        if section.replicas and not section.resources.num_gpus and kv + weights > total:
            raise ConfigError(
                f"kv.memory: a {pool} worker takes {_gib(kv)} for KV and {_gib(weights)} for "
                f"weights, and this machine has {_gib(total)}; set kv.memory lower, or choose a "
                "smaller model"
            )


def memory_bytes() -> int:
    """Returns the memory that this process and its children may use, in bytes."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _CGROUP_LIMITS:
        # There is no such control group, or the file contains the word max.
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(Path(path).read_text()))
    return total


def _check_gpus(config: ClusterConfig) -> None:
    """Raises ConfigError if workers need GPUs and this machine has no GPU driver. Ray checks later
    whether there are enough GPUs.
    """
    needed = {
        pool: config.pool(pool).replicas * config.pool(pool).resources.num_gpus
        for pool in POOLS
        if config.pool(pool).resources.num_gpus
    }
    if sum(needed.values()) and not any(
        next(Path("/dev").glob(name), None) for name in _GPU_DEVICES
    ):
        each = ", ".join(f"{pool} {amount:g}" for pool, amount in needed.items())
        raise ConfigError(
            f"resources.num_gpus: the workers need {sum(needed.values()):g} GPUs ({each}), and "
            "this machine has no GPU driver; set num_gpus to 0 to run on the CPU"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
