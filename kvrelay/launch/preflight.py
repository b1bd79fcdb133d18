"""Checks that a cluster can run on this machine, before any process is started."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvrelay.config.listen import ENDPOINTS
from kvrelay.config.schema import ClusterConfig
from kvrelay.config.tokens_file import load_tokens
from kvrelay.errors import ConfigError, NotFound, Unavailable
from kvrelay.launch.ray_folder import PARENT
from kvrelay.models import local_folder, resolve_model
from kvrelay.models.model_files import check_model_files
from kvrelay.security.credentials import Credentials
from kvrelay.types import POOLS

# For the logs and sockets of a start.
_ROOM_BYTES = 32 * 2**20
# Files in /dev, of the drivers that Ray supports.
_GPU_DEVICES = ("nvidia[0-9]*", "nvidiactl", "dxg", "kfd", "accel*")
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
    _check_ports(config)
    _check_room(Path(_temporary_folder()), "set TMPDIR to another folder")
    if is_local:
        Credentials.internal(config.security, "worker")
        _check_room(PARENT, "Ray keeps its sockets and logs there")
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
                    f"listen.{endpoint}: cannot listen on {address}: {reason}; end what listens "
                    f"there, perhaps another cluster, or set --{endpoint}-port to a free port, or "
                    "to 0 for any"
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
            f"TMPDIR: {error.strerror}; set it to a folder that can be written to"
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
            f"free some; {hint}"
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
                f"weights, and this machine has {_gib(total)}; set kv.memory lower, or take a "
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
            "this machine has no driver of any; set it to 0 for the CPU"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
