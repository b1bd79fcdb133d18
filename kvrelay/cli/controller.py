"""`kvrelay controller`: starts, watches and scales the workers of a cluster."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli.options.cluster import Config, LogLevel, RayAddress
from kvrelay.cli.required_packages import requires_cluster_extra
from kvrelay.cli.serve import require_shared_redis, set_log_level

if TYPE_CHECKING:
    from kvrelay.config.schema import ClusterConfig
    from kvrelay.launch.model_controller import ModelController, ModelPools


@requires_cluster_extra
def controller(
    config: Config = None,
    ray_address: RayAddress = None,
    log_level: LogLevel = None,
    sole: Annotated[
        bool,
        typer.Option("--sole", hidden=True, help="Do not wait for the lease of other controllers."),
    ] = False,
    first: Annotated[
        bool,
        typer.Option("--first", hidden=True, help="End if a model cannot be served at the start."),
    ] = False,
) -> None:
    """Run and scale the workers of a cluster as Ray actors. `kvrelay serve` starts a controller.

    One of several controllers on the same Redis leads. The others stand by until its lease ends.

    redis.url names the Redis that all components share. The first SIGTERM drains the workers; the
    second ends them at once.

    Example: kvrelay controller -c cluster.yaml --ray-address auto
    """
    from kvrelay.config.config_file import load_config
    from kvrelay.launch.model_controller import ModelPools
    from kvrelay.launch.ray.address import check_ray_address, check_reachable
    from kvrelay.process.telemetry import configure_logging

    loaded = load_config(config)
    if ray_address is not None:
        check_ray_address(ray_address)
        check_reachable(loaded)
    require_shared_redis(loaded.redis.url, "controller")
    pools = [ModelPools(one) for one in loaded.served]
    set_log_level(log_level)
    configure_logging()
    asyncio.run(_control(loaded, pools, ray_address, sole, first))


async def _control(
    config: ClusterConfig,
    pools: list[ModelPools],
    ray_address: str | None,
    sole: bool,
    first: bool,
) -> None:
    """Runs until a signal and the drain of all workers, or a second signal.

    Raises the error that prevents the workers of the only model from starting, for example
    ModelRefused. One of several models ends only its own workers, except with `first`, until each
    model has served.
    """
    from kvrelay.launch.launcher import require_gpus
    from kvrelay.launch.model_controller import ModelController
    from kvrelay.launch.ray.cluster import RayCluster, local_cpus
    from kvrelay.launch.worker_template import Template
    from kvrelay.models import resolve_model
    from kvrelay.process.loop_stall import LoopStalls
    from kvrelay.process.stop_request import StopRequest
    from kvrelay.state.registry import Registry

    stop = StopRequest()
    # Before anything starts.
    if len(pools) == 1:
        resolve_model(config.model.path)
    # Differs from the owner of any earlier process, also of one with the same process id. A host
    # name may have any characters.
    host = re.sub("[^A-Za-z0-9.-]", "-", socket.gethostname())[:64]
    owner = f"host-{host}-{os.getpid()}-{secrets.token_hex(4)}"
    async with AsyncExitStack() as exits:
        registries = [
            await exits.enter_async_context(
                await Registry.connect(
                    one.config.redis.url,
                    namespace=one.config.redis.namespace,
                    loopback_only=config.listen.workers_on_loopback,
                    confirm_replicas=config.redis.confirm_replicas,
                )
            )
            for one in pools
        ]
        forks = [ray_address is None and Template.suits(one.config) for one in pools]
        # By number of threads.
        templates = {
            threads: exits.enter_context(Template(threads))
            for threads in {
                one.config.decode.threads for one, fork in zip(pools, forks, strict=True) if fork
            }
        }
        cpus = local_cpus([(one.config, one.most, one.standby) for one in pools])
        cluster = exits.enter_context(RayCluster(ray_address, cpus))
        # A cluster of several nodes may still grow.
        if cluster.is_local:
            require_gpus([(one.config, one.standby) for one in pools], cluster.gpus)
        # After ray.init, which sets handlers of its own.
        stop.install()
        controllers = [
            ModelController(
                one,
                registry,
                cluster,
                owner,
                sole=sole,
                template=templates[one.config.decode.threads].path if fork else "",
            )
            for one, registry, fork in zip(pools, registries, forks, strict=True)
        ]
        await asyncio.gather(*(one.begin() for one in controllers))
        stalls = LoopStalls("controller")

        def is_fatal() -> bool:
            starts = first and not all(one.has_served for one in controllers)
            return starts or len(controllers) == 1

        runs = [one.run_contained(is_fatal) for one in controllers]
        parts = [asyncio.create_task(one) for one in (*runs, cluster.lost(), stalls.run())]
        stopped = asyncio.create_task(stop.drain.wait())
        done, pending = await asyncio.wait({*parts, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if not cluster.is_lost:
            leaving, halted = (
                asyncio.create_task(_all_leave(controllers)),
                asyncio.create_task(stop.halt.wait()),
            )
            await asyncio.wait({leaving, halted}, return_when=asyncio.FIRST_COMPLETED)
            halted.cancel()
            leaving.cancel()
            await asyncio.gather(leaving, halted, return_exceptions=True)
            await asyncio.gather(*(one.stop_all() for one in controllers))
        for task in done:
            task.result()


async def _all_leave(controllers: list[ModelController]) -> None:
    await asyncio.gather(*(one.leave() for one in controllers))
