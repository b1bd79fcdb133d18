"""`kvrelay check`: what a configuration means on this machine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

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
from kvrelay.cli.required_packages import requires_cluster_extra
from kvrelay.cli.views import render
from kvrelay.errors import KvRelayError
from kvrelay.models import has_tokenizer
from kvrelay.planning.quantity import decimal_bytes, size
from kvrelay.process.tcp_address import unreachable
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
    all that `kvrelay serve` and its workers refuse before weights are loaded. Starts nothing.

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
    models = []
    for one in loaded.served:
        pools = plan_memory(one, machine)
        policy = None if one.autoscaling is None else load_policy(Path(one.autoscaling))
        models.append(CheckedModel(one, pools, largest_pools(pools, policy)))
    problems = [*_card_problems(loaded), *machine_problems(loaded)]
    try:
        asyncio.run(check_redis(loaded))
    except KvRelayError as error:
        problems.append(error.message)
    if as_json:
        print(json.dumps(_document(loaded, models, machine, problems), indent=2))
    else:
        print(_values(loaded, all_values=all_values))
        _print(loaded, models, machine, problems)
    raise typer.Exit(1 if problems else 0)


def _card_problems(config: ClusterConfig) -> Iterator[str]:
    """Yields why a router would not serve a model."""
    from kvrelay.models import local_folder, resolve_model
    from router.frontend.model_card import ModelCard, ask_transformers

    for one in config.served:
        try:
            ModelCard.load(local_folder(resolve_model(one.model.path)), one.model, ask_transformers)
        except KvRelayError as error:
            yield error.message


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """What one model of a configuration takes on this machine."""

    config: ClusterConfig
    pools: tuple[PoolMemory, ...]
    largest: LargestPools

    def document(self) -> dict[str, object]:
        """Returns the figures as plain data."""
        return {
            "memory": [
                asdict(one) | {"kv_tokens": one.kv_tokens, "sequences": one.sequences}
                for one in self.pools
            ],
            "largest": asdict(self.largest),
        }


def _document(
    config: ClusterConfig, models: list[CheckedModel], machine: Machine, problems: list[str]
) -> dict[str, object]:
    figures = (
        {"models": {str(one.config.model.name): one.document() for one in models}}
        if config.models
        else models[0].document()
    )
    return {
        "configuration": config.without_secrets(),
        "machine": asdict(machine),
        **figures,
        "warning": " ".join(_warnings(models, machine)) or None,
        "problem": "; ".join(problems) or None,
        "problems": problems,
    }


def _values(config: ClusterConfig, *, all_values: bool) -> str:
    """Returns the values of a configuration as YAML, which is a configuration file again."""
    import yaml

    values = config.without_secrets(changed=not all_values, units=True)
    title = "Every value" if all_values else "Values that differ from the defaults"
    if not values:
        return "# Every value is the default; --all prints them.\n"
    note = "" if all_values else "; --all prints every value"
    return f"# {title}{note}.\n{yaml.safe_dump(values, sort_keys=False)}"


def _print(
    config: ClusterConfig, models: list[CheckedModel], machine: Machine, problems: list[str]
) -> None:
    from kvrelay.config.listen import ENDPOINTS

    console = render.console()
    console.print(f"This machine: {machine}")
    sections = [one.config.pool(pool.pool) for one in models for pool in one.pools]
    if machine.gpus and not any(section.resources.num_gpus for section in sections):
        console.print(
            "The workers use no GPU; set engine: vllm and resources.num_gpus: 1 for both pools."
        )
    if any(one.resources.num_gpus and one.engine == "native" for one in sections):
        console.print(
            "kvrelay's own engine is experimental on GPUs, and no GPU has run it; engine: vllm is "
            "the one to choose there."
        )
    for one in models:
        if config.models:
            console.print(f"\n{one.config.model.name}: {one.config.model.path}", highlight=False)
        _print_model(console, one)
    total = sum(one.workers * one.worker_bytes for model in models for one in model.pools)
    all_workers = (
        f"All workers together: at most {size(total)}, and about 400 MiB for each process."
    )
    console.print(all_workers)
    if any(one.engine == "native" for one in sections):
        console.print("KV memory is taken as it fills. At once: sequences of max_model_len tokens.")
    if routers := _router_bytes(config):
        console.print(f"The router: {config.router.processes} processes, about {size(routers)}.")
    for warning in _warnings(models, machine):
        console.print(f"Warning: {warning}")
    ports = ", ".join(f"{name} {getattr(config.listen, name)}" for name in ENDPOINTS)
    console.print(f"Listens on {ports}.")
    for problem in problems:
        console.print(f"Not ready: {problem}.")
    if not problems:
        console.print("Ready to serve.")


def _print_model(console: Console, model: CheckedModel) -> None:
    console.print(_memory_table(model.pools))
    for one in model.pools:
        if one.auto:
            console.print(f"kv.memory: auto of a {one.pool} worker: {one.auto}.")
    for line in _weight_lines(model.pools):
        console.print(line)
    for one in model.pools:
        if one.draft_kv_bytes:
            console.print(
                f"Draft model of each {one.pool} worker: {size(one.draft_weight_bytes)} of "
                f"weights and {size(one.draft_kv_bytes)} for KV."
            )
    for line in _tier_lines(model.pools):
        console.print(line)
    if model.config.autoscaling is not None:
        console.print(
            f"Largest pools that {Path(model.config.autoscaling).name} allows: {model.largest}; at "
            f"most {size(model.largest.num_bytes)} with their processes."
        )


def _warnings(models: list[CheckedModel], machine: Machine) -> Iterator[str]:
    """Yields what a cluster can start with, but is probably not meant."""
    if text := _too_large(models, machine):
        yield text
    for config in (one.config for one in models):
        for pool in POOLS:
            threads = config.pool(pool).threads
            if threads > machine.cores and not config.pool(pool).resources.num_gpus:
                yield (
                    f"{pool}.threads is {threads}, and this machine has {machine.cores} cores; "
                    "more threads than cores slow a worker down."
                )
        if not has_tokenizer(config.model.path):
            yield (
                f"{config.model.path} has no tokenizer.json: the model takes token_ids and no "
                "text, so text prompts, chats and stop strings are refused."
            )


def _too_large(models: list[CheckedModel], machine: Machine) -> str:
    """Says whether the largest pools exceed the memory of this machine. A GPU holds weights and KV
    of its worker, so the memory of the host says nothing about pools with GPUs.
    """
    on_gpu = any(
        one.config.pool(pool).resources.num_gpus for one in models for pool in one.largest.sizes
    )
    config = models[0].config
    routers = _router_bytes(config)
    total = sum(one.largest.num_bytes for one in models) + routers
    if on_gpu or total <= machine.memory_bytes:
        return ""
    policies = {Path(one.config.autoscaling).name for one in models if one.config.autoscaling}
    remedy = (
        f"lower max_replicas or standby in {' and '.join(sorted(policies))}, or kv.memory"
        if policies
        else "lower prefill.replicas, decode.replicas or kv.memory"
    )
    router = f" and {config.router.processes} processes of the router" if routers else ""
    return (
        f"the largest pools ({'; '.join(str(one.largest) for one in models)}){router} take up to "
        f"{size(total)}, and this machine has {size(machine.memory_bytes)}; {remedy}, or run the "
        "workers on more machines."
    )


def _router_bytes(config: ClusterConfig) -> int:
    """Memory of a router of several processes; 0 for one process, which is small."""
    from kvrelay.launch.checks.preflight import ROUTER_BYTES

    return config.router.processes * ROUTER_BYTES if config.router.processes > 1 else 0


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
        if one.stores:
            yield (
                f"Tier remote of each {one.pool} worker: the stores {', '.join(one.stores)}, which "
                "`kvrelay kv-store` runs."
            )
    if down := unreachable(dict.fromkeys(store for one in pools for store in one.stores)):
        yield f"Nothing listens at {', '.join(down)} now. Workers skip a store until it answers."


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
