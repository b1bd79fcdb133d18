"""`kvrelay controller`: the workers of a cluster, and who scales them."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli.cluster_extra import requires_cluster_extra
from kvrelay.cli.serve import Config, LogLevel, set_log_level

if TYPE_CHECKING:
    from kvrelay.config import AutoscalingPolicy, ClusterConfig
    from kvrelay.types import PoolName

_BY_HAND = 16  # workers of a pool without a policy that `kvrelay scale` may ask a local Ray for


@requires_cluster_extra
def controller(
    config: Config = None,
    ray_address: Annotated[
        str | None,
        typer.Option(envvar="KVRELAY_RAY_ADDRESS", help="A running Ray cluster; without it, one starts here."),
    ] = None,
    log_level: LogLevel = None,
) -> None:
    """Run the workers of a cluster as Ray actors, and scale them; `serve` starts one by itself.

    redis.url in the configuration names the Redis that all parts share. SIGTERM drains the workers and ends; a second
    one ends at once.

    Example: kvrelay controller -c cluster.yaml --ray-address auto
    """
    from kvrelay.config_file import load_config, load_policy
    from kvrelay.telemetry import configure_logging

    loaded = load_config(config)
    policy = None if loaded.autoscaling is None else load_policy(Path(loaded.autoscaling))
    set_log_level(log_level)
    configure_logging()
    asyncio.run(_control(loaded, policy, ray_address))


async def _control(config: ClusterConfig, policy: AutoscalingPolicy | None, ray_address: str | None) -> None:
    """Until a signal and the drain of all workers, or a second one.

    Raises what a worker cannot start without, such as ModelRefused.
    """
    from autoscaler.actuator import Actuator
    from autoscaler.loop import Autoscaler
    from kvrelay.launch import RayLauncher, local_cpus
    from kvrelay.models import resolve_model
    from kvrelay.registry import Registry
    from kvrelay.security.credentials import Credentials
    from kvrelay.stop_request import StopRequest
    from kvrelay.worker.settings import WorkerSettings

    stop = StopRequest()
    sizes: dict[PoolName, int] = {"prefill": config.prefill.replicas, "decode": config.decode.replicas}
    settings = WorkerSettings(
        "", "decode", resolve_model(config.model.path), config.redis.url, config, pin=ray_address is None
    )
    credentials = Credentials.internal(config.security, "router")
    registry = await Registry.connect(config.redis.url, loopback_only=config.listen.workers_on_loopback)
    owner = f"{socket.gethostname()}-{os.getpid()}"
    with RayLauncher(
        settings, ray_address=ray_address, num_cpus=local_cpus(config, _largest(sizes, policy))
    ) as launcher:
        stop.install()  # only now: ray.init sets handlers of its own
        actuator = Actuator(registry, launcher, sizes, credentials=credentials)
        parts = [asyncio.create_task(one) for one in (actuator.run(), launcher.refused(), launcher.lost())]
        if policy is not None:
            parts.append(asyncio.create_task(Autoscaler(registry, policy, owner).run()))
        stopped = asyncio.create_task(stop.drain.wait())
        done, pending = await asyncio.wait({*parts, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if not launcher.is_lost:
            leaving, halted = asyncio.create_task(actuator.leave()), asyncio.create_task(stop.halt.wait())
            await asyncio.wait({leaving, halted}, return_when=asyncio.FIRST_COMPLETED)
            halted.cancel()
            leaving.cancel()
            await asyncio.gather(leaving, halted, return_exceptions=True)
            await launcher.stop_all()
        await registry.close()
        for task in done:
            task.result()


def _largest(sizes: dict[PoolName, int], policy: AutoscalingPolicy | None) -> dict[PoolName, int]:
    """How many workers each pool may come to have, by its policy or by hand, and one that is to replace another."""
    largest = dict.fromkeys(sizes, _BY_HAND)
    for pool, size in sizes.items():
        bounds = policy.pool(pool) if policy is not None else None
        largest[pool] = max(size, _BY_HAND if bounds is None else bounds.max_replicas) + 1
    return largest
