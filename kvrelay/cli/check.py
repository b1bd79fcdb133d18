"""`kvrelay check`: what a configuration means on this machine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvrelay.cli.cluster_extra import requires_cluster_extra
from kvrelay.cli.options.cluster import (
    AdminPort,
    Config,
    Decode,
    GrpcPort,
    HttpPort,
    Model,
    ModelArgument,
    Prefill,
    effective_config,
)
from kvrelay.cli.options.output import AsJson
from kvrelay.cli.views import render
from kvrelay.errors import KvRelayError
from kvrelay.models import has_tokenizer
from kvrelay.planning.quantity import decimal_bytes, size
from kvrelay.types.workers import POOLS

if TYPE_CHECKING:
    from kvrelay.config.schema import ClusterConfig
    from kvrelay.launch.checks.largest_pools import LargestPools
    from kvrelay.launch.checks.memory_plan import PoolMemory
    from kvrelay.process.machine import Machine


@requires_cluster_extra
def check(
    path: ModelArgument = None,
    config: Config = None,
    model: Model = None,
    prefill: Prefill = None,
    decode: Decode = None,
    grpc_port: GrpcPort = None,
    http_port: HttpPort = None,
    admin_port: AdminPort = None,
    all_values: Annotated[
        bool, typer.Option("--all", help="Print the values that are the defaults, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a configuration and this machine: the changed values, the memory of the workers, and
    everything that `kvrelay serve` would refuse. Starts nothing.

    The ports must be free. While a cluster runs, its own ports are reported as in use.

    Exits with 2 for a configuration that is not valid, and with 1 if this machine cannot run it.

    Example: kvrelay check -c configs/default.yaml
    """
    from kvrelay.config.config_file import load_policy
    from kvrelay.launch.checks.largest_pools import largest_pools
    from kvrelay.launch.checks.memory_plan import plan_memory
    from kvrelay.launch.checks.preflight import machine_problems
    from kvrelay.launch.checks.redis_claim import check_redis
    from kvrelay.process.machine import Machine

    loaded = effective_config(
        config,
        argument=path,
        model=model,
        prefill=prefill,
        decode=decode,
        grpc_port=grpc_port,
        http_port=http_port,
        admin_port=admin_port,
    )
    machine = Machine.here()
    pools = plan_memory(loaded, machine)
    policy = None if loaded.autoscaling is None else load_policy(Path(loaded.autoscaling))
    largest = largest_pools(pools, policy)
    problems = machine_problems(loaded)
    try:
        asyncio.run(check_redis(loaded))
    except KvRelayError as error:
        problems.append(error.message)
    if as_json:
        print(json.dumps(_document(loaded, pools, largest, machine, problems), indent=2))
    else:
        print(_values(loaded, all_values=all_values))
        _print(loaded, pools, largest, machine, problems)
    raise typer.Exit(1 if problems else 0)


def _document(
    config: ClusterConfig,
    pools: tuple[PoolMemory, ...],
    largest: LargestPools,
    machine: Machine,
    problems: list[str],
) -> dict[str, object]:
    return {
        "configuration": config.without_secrets(),
        "machine": asdict(machine),
        "memory": [
            asdict(one) | {"kv_tokens": one.kv_tokens, "sequences": one.sequences} for one in pools
        ],
        "largest": asdict(largest),
        "warning": " ".join(_warnings(config, largest, machine)) or None,
        "problem": "; ".join(problems) or None,
        "problems": problems,
    }


def _values(config: ClusterConfig, *, all_values: bool) -> str:
    """Returns the values of a configuration as YAML, which is a configuration file again."""
    import yaml

    values = config.without_secrets(changed=not all_values)
    title = "Every value" if all_values else "Values that differ from the defaults"
    if not values:
        return "# Every value is the default; --all prints them.\n"
    note = "" if all_values else "; --all prints every value"
    return f"# {title}{note}.\n{yaml.safe_dump(values, sort_keys=False)}"


def _print(
    config: ClusterConfig,
    pools: tuple[PoolMemory, ...],
    largest: LargestPools,
    machine: Machine,
    problems: list[str],
) -> None:
    from kvrelay.config.listen import ENDPOINTS

    console = render.console()
    console.print(f"This machine: {machine}")
    if machine.gpus and not any(config.pool(one.pool).resources.num_gpus for one in pools):
        console.print("The workers use no GPU; set prefill.resources.num_gpus and decode's to 1.")
    console.print(_memory_table(pools))
    for one in pools:
        if one.auto:
            console.print(f"kv.memory: auto of a {one.pool} worker: {one.auto}.")
    for line in _weight_lines(pools):
        console.print(line)
    total = sum(one.workers * one.worker_bytes for one in pools)
    console.print(
        f"All workers together: at most {size(total)}, and about 400 MiB for each process.\n"
        "KV memory is taken as it fills. At once: sequences of max_model_len tokens."
    )
    for one in pools:
        if one.draft_kv_bytes:
            console.print(
                f"Draft model of each {one.pool} worker: {size(one.draft_weight_bytes)} of "
                f"weights and {size(one.draft_kv_bytes)} for KV."
            )
    for line in _tier_lines(pools):
        console.print(line)
    if config.autoscaling is not None:
        console.print(
            f"Largest pools that {Path(config.autoscaling).name} allows: {largest}; at most "
            f"{size(largest.num_bytes)} with their processes."
        )
    for warning in _warnings(config, largest, machine):
        console.print(f"Warning: {warning}")
    ports = ", ".join(f"{name} {getattr(config.listen, name)}" for name in ENDPOINTS)
    console.print(f"Listens on {ports}.")
    for problem in problems:
        console.print(f"Not ready: {problem}.")
    if not problems:
        console.print("Ready to serve.")


def _warnings(config: ClusterConfig, largest: LargestPools, machine: Machine) -> Iterator[str]:
    """Yields what a cluster can start with, but is probably not meant."""
    if text := _too_large(config, largest, machine):
        yield text
    for pool in POOLS:
        threads = config.pool(pool).threads
        if threads > machine.cores and not config.pool(pool).resources.num_gpus:
            yield (
                f"{pool}.threads is {threads}, and this machine has {machine.cores} cores; more "
                "threads than cores slow a worker down."
            )
    if not has_tokenizer(config.model.path):
        yield (
            f"{config.model.path} has no tokenizer.json: the model takes token_ids and no text, "
            "so text prompts, chats and stop strings are refused."
        )


def _too_large(config: ClusterConfig, largest: LargestPools, machine: Machine) -> str:
    """Says whether the largest pools exceed the memory of this machine. A GPU holds weights and KV
    of its worker, so the memory of the host says nothing about pools with GPUs.
    """
    on_gpu = any(config.pool(pool).resources.num_gpus for pool in largest.sizes)
    if on_gpu or largest.num_bytes <= machine.memory_bytes:
        return ""
    remedy = (
        "lower prefill.replicas, decode.replicas or kv.memory"
        if config.autoscaling is None
        else f"lower max_replicas or standby in {Path(config.autoscaling).name}, or kv.memory"
    )
    return (
        f"the largest pools ({largest}) take up to {size(largest.num_bytes)}, and this "
        f"machine has {size(machine.memory_bytes)}; {remedy}, or run the workers on more "
        "machines."
    )


def _weight_lines(pools: tuple[PoolMemory, ...]) -> Iterator[str]:
    """Explains weights that are larger in memory than in the files, once for equal pools."""
    found = {(one.weight_bytes or 0, one.head_copy_bytes) for one in pools if one.head_copy_bytes}
    for in_memory, copy in sorted(found):
        own = in_memory - copy
        yield (
            f"Weights of {size(in_memory)}: {size(own)} ({decimal_bytes(own)}) of the model, and "
            f"{size(copy)} for a copy of its embeddings, which CPU kernels read as the head."
        )


def _tier_lines(pools: tuple[PoolMemory, ...]) -> Iterator[str]:
    """Describes the tiers, and the room on the disk."""
    for one in pools:
        if one.host_tier_bytes:
            yield (
                f"Tier host of each {one.pool} worker: {size(one.host_tier_bytes)} of "
                f"memory{_tokens(one, one.host_tier_bytes)}."
            )
        if one.disk_tier_bytes:
            all_workers = one.workers * one.disk_tier_bytes
            free = _free_bytes(Path(one.disk_tier_path))
            yield (
                f"Tier disk of each {one.pool} worker: {size(one.disk_tier_bytes)}"
                f"{_tokens(one, one.disk_tier_bytes)} in {one.disk_tier_path}, whose disk has "
                f"{size(free)} free."
                + (" That is too little for all workers." if all_workers > free else "")
            )


def _free_bytes(folder: Path) -> int:
    """Bytes that are free where the folder is, or will be; 0 if that is unknown."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _tokens(pool: PoolMemory, num_bytes: int) -> str:
    if not pool.block_bytes:
        return ""
    return f", KV of {num_bytes // pool.block_bytes * pool.block_size:,} tokens"


def _memory_table(pools: tuple[PoolMemory, ...]) -> Table:
    table = Table(title="memory of each worker", title_justify="left")
    table.add_column("pool", no_wrap=True)
    for name in ("workers", "weights", "KV", "KV tokens", "max_model_len", "at once"):
        table.add_column(name, justify="right")
    for one in pools:
        known = one.block_bytes > 0
        table.add_row(
            one.pool,
            str(one.workers),
            "not downloaded" if one.weight_bytes is None else size(one.weight_bytes),
            size(one.kv_bytes) if one.kv_bytes else "auto",
            f"{one.kv_tokens:,}" if known and one.kv_bytes else "-",
            f"{one.longest_sequence:,}" if known else "-",
            f"{one.sequences:,}" if known and one.kv_bytes else "-",
        )
    return table
