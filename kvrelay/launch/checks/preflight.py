"""Checks that a cluster can run on this machine, before any process is started."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from kv_transfer.transport_selection import choose_transport, missing_package
from kvrelay.config.schema import ClusterConfig
from kvrelay.config.tokens_file import load_tokens
from kvrelay.errors import ConfigError, KvRelayError, ModelRefused, Unavailable, Unimplemented
from kvrelay.launch.checks.engine_check import check_engine
from kvrelay.launch.checks.memory_plan import PoolMemory, plan_memory
from kvrelay.launch.checks.port_check import check_ports
from kvrelay.launch.checks.process_limit import check_processes
from kvrelay.models import local_folder, resolve_model
from kvrelay.models.adapters.adapter_reading import read_in_time
from kvrelay.models.model_json import read_config_json
from kvrelay.models.model_shape import model_shape
from kvrelay.models.model_size import longest_sequence
from kvrelay.planning.quantity import size
from kvrelay.process.machine import Machine
from kvrelay.process.owned_folder import SHORT_PARENT
from kvrelay.security.credentials import Credentials
from kvrelay.types.token_eviction import WHY_NOT_WITH_WINDOWS
from kvrelay.types.workers import POOLS

# For the logs and sockets of a start.
_ROOM_BYTES = 32 * 2**20
_LOOPBACK_S = 5.0
# Ray's object store, and the segments of the transport shm.
_SHARED_MEMORY = Path("/dev/shm")
# Bytes of the names below a disk tier's path: folders of the worker and its layout, and a file.
_TIER_NAMES = 256
# The least that a worker takes: a Python process with torch, without weights and KV.
_WORKER_BYTES = 128 * 2**20
# Memory of a process of a router, with those that render chat templates and try out schemas.
ROUTER_BYTES = 250 * 2**20


def check_machine(config: ClusterConfig, *, is_local: bool) -> None:
    """Raises a KvRelayError that says what is wrong and what to do.

    is_local: the workers run on this machine only. Otherwise, the resources of the workers are
    checked where they start.
    """
    for check in _checks(config, is_local=is_local):
        check()


def machine_problems(config: ClusterConfig) -> list[str]:
    """Returns everything that `check_machine` would raise, for workers on this machine, and why
    they would refuse a model.
    """
    found = []
    for check in _checks(config, is_local=True, thorough=True):
        try:
            check()
        except KvRelayError as error:
            found.append(error.message)
    return found


def _checks(
    config: ClusterConfig, *, is_local: bool, thorough: bool = False
) -> Iterator[Callable[[], object]]:
    """Yields what raises a KvRelayError each. Raises the errors of `plan_memory`."""
    security = config.security
    if security.tokens_file is not None:
        yield partial(load_tokens, Path(security.tokens_file))
    yield partial(Credentials.internal, security, "router")
    yield partial(Credentials.public, security)
    machine = Machine.here()
    models = [(one, plan_memory(one, machine if is_local else None)) for one in config.served]
    for one, pools in models:
        yield partial(_check_kv, pools)
        yield partial(_check_eviction, one)
    yield partial(check_ports, config.listen)
    yield _check_temporary_folder
    yield _check_loopback
    if not is_local:
        return
    for one in config.served:
        yield partial(_check_transport, one)
        yield partial(_check_adapters, one)
    yield partial(Credentials.internal, security, "worker")
    yield partial(_check_room, SHORT_PARENT, "Ray keeps its sockets and logs there")
    yield partial(check_shared_memory, _SHARED_MEMORY)
    workers = sum(one.pool(pool).replicas for one in config.served for pool in POOLS)
    yield partial(_check_workers, workers, machine.memory_bytes)
    yield partial(check_processes, workers, config.router.processes)
    yield partial(_check_routers, config.router.processes, machine.memory_bytes)
    for one, pools in models:
        yield partial(_check_memory, one, pools, machine.memory_bytes)
        for pool in pools:
            yield partial(_check_tiers, pool)
    yield partial(_check_gpus, config, machine)
    # Last, since it takes seconds.
    for one in config.served:
        yield partial(check_engine, one, thorough=thorough)


def _check_kv(pools: tuple[PoolMemory, ...]) -> None:
    """Raises ConfigError if a pool's KV memory cannot hold one sequence. The worker checks exactly,
    when it has loaded the model; this check is faster and covers common architectures.
    """
    for one in pools:
        if one.workers and 0 < one.staging_bytes < one.least_kv_bytes:
            raise ConfigError(
                f"kv.memory: a quarter of the {one.kv_bytes} bytes of a {one.pool} worker holds KV "
                f"on its way between workers, and cannot hold one sequence of model.max_model_len "
                f"= {one.longest_sequence} tokens, which takes {one.least_kv_bytes} bytes; set "
                f"kv.memory to at least {one.least_kv_bytes * 4}, or model.max_model_len lower"
            )
        if one.workers and not one.auto and one.cache_bytes < one.least_kv_bytes:
            raise ConfigError(
                f"kv.memory: {one.kv_bytes} bytes of a {one.pool} worker do not hold one sequence "
                f"of model.max_model_len = {one.longest_sequence} tokens, which takes "
                f"{one.least_kv_bytes} bytes; set kv.memory to at least that, or "
                "model.max_model_len lower"
            )


def _check_eviction(config: ClusterConfig) -> None:
    """Raises ConfigError for a model with windows, where tokens cannot be dropped. The worker
    checks what depends on the model's code.
    """
    if config.kv.eviction is None:
        return
    folder = Path(local_folder(resolve_model(config.model.path)))
    model = read_config_json(folder)
    try:
        windows = [layer.window for layer in model_shape(model).layers]
    except ModelRefused:
        # Unusual layers: the worker knows them.
        return
    longest = longest_sequence(model, None)
    if any(0 < window < (longest or math.inf) for window in windows):
        raise ConfigError(f"kv.eviction: {WHY_NOT_WITH_WINDOWS}")


def _check_adapters(config: ClusterConfig) -> None:
    """Raises ConfigError for the first adapter whose files cannot be served by any model. A worker
    compares them with its model.
    """
    for place, one in enumerate(config.adapters.serve):
        try:
            asyncio.run(read_in_time(one.path, config.adapters.max_rank))
        except ModelRefused as error:
            raise ConfigError(f"adapters.serve[{place}].path: {error.message}") from None


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


def _check_transport(config: ClusterConfig) -> None:
    """Raises ConfigError if no hand-off between workers of this machine can use the transport."""
    requested = config.transfer.transport
    if not config.prefill.replicas:
        return
    prefill, decode = (
        "cuda" if config.pool(pool).resources.num_gpus else "cpu" for pool in ("prefill", "decode")
    )
    try:
        choose_transport(
            requested,
            same_process=False,
            same_host=True,
            device=prefill,
            target_device=decode,
            in_vllm=config.transfer.in_vllm,
        )
    except Unimplemented as error:
        raise ConfigError(f"transfer.transport: {error.message}") from None
    if missing := missing_package(requested):
        raise ConfigError(f"transfer.transport: {missing}, or set transfer.transport: auto")


def _check_workers(wanted: int, total: int) -> None:
    """Raises ConfigError if the processes of the workers alone exceed the memory."""
    most = max(2, total // _WORKER_BYTES)
    if wanted > most:
        raise ConfigError(
            f"prefill.replicas and decode.replicas: {wanted} workers are more than this machine "
            f"can run; its {size(total)} of memory allow at most {most}, since each process takes "
            f"at least {_WORKER_BYTES >> 20} MiB; lower --prefill and --decode"
        )


def _check_routers(processes: int, total: int) -> None:
    """Raises ConfigError if the processes of the router alone exceed the memory."""
    most = max(1, total // ROUTER_BYTES)
    if processes > most:
        raise ConfigError(
            f"router.processes: {processes} are more than this machine can run; its {size(total)} "
            f"of memory allow at most {most}, since each takes about {ROUTER_BYTES >> 20} MiB"
        )


def _check_temporary_folder() -> None:
    """Raises ConfigError or Unavailable if there is no folder for temporary files, or no room."""
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        raise ConfigError(
            f"TMPDIR: {error.strerror}; set TMPDIR to a folder with write access"
        ) from None
    _check_room(Path(folder), "set TMPDIR to another folder")


def _check_loopback() -> None:
    """Raises Unavailable if processes of this machine cannot reach each other over 127.0.0.1."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_LOOPBACK_S),
        ):
            pass
    except OSError as error:
        raise Unavailable(
            f"127.0.0.1 does not answer: {error.strerror or error}; the processes of a cluster "
            "talk over it: bring the loopback interface up, with `ip link set lo up` for instance"
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


def _check_memory(config: ClusterConfig, pools: tuple[PoolMemory, ...], total: int) -> None:
    """Checks that each worker fits by itself. How many workers fit together depends on how full
    their caches are.
    """
    for one in pools:
        on_gpu = config.pool(one.pool).resources.num_gpus > 0
        weights = one.weight_bytes or 0
        if one.workers and (one.host_tier_bytes if on_gpu else one.worker_bytes) > total:
            if one.draft_kv_bytes:
                raise ConfigError(
                    f"decode.speculation.memory: a decode worker takes {size(one.worker_bytes)}, "
                    f"of which {size(one.draft_kv_bytes)} are KV of the draft model, and this "
                    f"machine has {size(total)}; set decode.speculation.memory or kv.memory lower"
                )
            if one.host_tier_bytes:
                raise ConfigError(
                    f"kv.tiers: the host tier of a {one.pool} worker takes "
                    f"{size(one.host_tier_bytes)} beside its KV and weights, and this machine has "
                    f"{size(total)}; set the size of the tier lower"
                )
            raise ConfigError(
                f"kv.memory: a {one.pool} worker takes {size(one.kv_bytes)} for KV and "
                f"{size(weights)} for weights, and this machine has {size(total)}; set kv.memory "
                "lower, or choose a smaller model"
            )


def _check_tiers(pool: PoolMemory) -> None:
    """Raises ConfigError if a pool's disk tier cannot be used, or a tier holds no block."""
    for kind, given in (("host", pool.host_tier_bytes), ("disk", pool.disk_tier_bytes)):
        if pool.workers and 0 < given < 2 * pool.block_bytes:
            raise ConfigError(
                f"kv.tiers: the {kind} tier of a {pool.pool} worker has {given} bytes, and a block "
                f"of KV takes {pool.block_bytes}; set size to at least {2 * pool.block_bytes}"
            )
    if not pool.workers or not pool.disk_tier_path:
        return
    folder = Path(pool.disk_tier_path)
    # The workers create what is missing.
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    reason = ""
    is_path = str(folder) == pool.disk_tier_path
    if _is_too_long(pool.disk_tier_path, folder):
        reason = "it or a part of it is longer than the file system allows"
    elif not folder.is_dir() or (is_path and folder.is_symlink()):
        reason = f"{folder} is not a folder"
    elif not _can_be_written(folder):
        reason = f"{folder} cannot be written to"
    elif is_path and folder.stat().st_mode & 0o022:
        reason = f"{folder} can be written to by other users, who could change answers"
    if reason:
        raise ConfigError(
            f"kv.tiers: the disk tier of the {pool.pool} workers cannot use "
            f"{pool.disk_tier_path}: {reason}; set path to a folder that only this user can write "
            "to, or that does not exist yet"
        )


def _is_too_long(path: str, existing: Path) -> bool:
    """Whether a tier's files cannot have names below `path`, of which `existing` exists."""
    most, most_of_part = (os.pathconf(existing, name) for name in ("PC_PATH_MAX", "PC_NAME_MAX"))
    parts = map(os.fsencode, Path(path).parts)
    return len(os.fsencode(path)) + _TIER_NAMES > most or max(map(len, parts)) > most_of_part


def _can_be_written(folder: Path) -> bool:
    """Whether a file can be created there: root may write anywhere, but not to /proc."""
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="kvrelay-"):
            return True
    except OSError:
        return False


def _check_gpus(config: ClusterConfig, machine: Machine) -> None:
    """Raises ConfigError if workers need GPUs and this machine has no GPU driver. Ray checks later
    whether there are enough GPUs.
    """
    needed = {
        pool: amount
        for pool in POOLS
        if (
            amount := sum(
                one.pool(pool).replicas * one.pool(pool).resources.num_gpus for one in config.served
            )
        )
    }
    if sum(needed.values()) and not machine.gpus:
        each = ", ".join(f"{pool} {amount:g}" for pool, amount in needed.items())
        raise ConfigError(
            f"resources.num_gpus: the workers need {sum(needed.values()):g} GPUs ({each}), and "
            "this machine has no GPU driver; set num_gpus to 0 to run on the CPU"
        )
