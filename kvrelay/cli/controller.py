"""`kvrelay controller`: the workers of a cluster, and who scales them."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli.cluster_extra import requires_cluster_extra
from kvrelay.cli.serve import Config, LogLevel, RayAddress, set_log_level
from kvrelay.errors import Unavailable

if TYPE_CHECKING:
    from autoscaler.actuator import Actuator
    from kvrelay.config.autoscaling_policy import AutoscalingPolicy
    from kvrelay.config.schema import ClusterConfig
    from kvrelay.launch.launcher import RayLauncher
    from kvrelay.state.registry import Registry
    from kvrelay.types import PoolName

_BY_HAND = 16  # workers of a pool without a policy that `kvrelay scale` may ask a local Ray for


@requires_cluster_extra
def controller(
    config: Config = None,
    ray_address: RayAddress = None,
    log_level: LogLevel = None,
    sole: Annotated[
        bool,
        typer.Option(
            "--sole", hidden=True, help="Redis is this controller's alone: do not wait for others."
        ),
    ] = False,
) -> None:
    """Run the workers of a cluster as Ray actors, and scale them; `serve` starts one by itself.

    Of several controllers with the same Redis one leads. The others stand by until its lease ends.

    redis.url in the configuration names the Redis that all parts share. SIGTERM drains the workers
    and ends; a second one ends at once.

    Example: kvrelay controller -c cluster.yaml --ray-address auto
    """
    from kvrelay.config.config_file import load_config, load_policy
    from kvrelay.launch.ray_address import check_ray_address, check_reachable
    from kvrelay.process.telemetry import configure_logging

    loaded = load_config(config)
    if ray_address is not None:
        check_ray_address(ray_address)
        check_reachable(loaded)
    policy = None if loaded.autoscaling is None else load_policy(Path(loaded.autoscaling))
    set_log_level(log_level)
    configure_logging()
    asyncio.run(_control(loaded, policy, ray_address, sole))


async def _control(
    config: ClusterConfig, policy: AutoscalingPolicy | None, ray_address: str | None, sole: bool
) -> None:
    """Until a signal and the drain of all workers, or a second one.

    Raises what a worker cannot start without, such as ModelRefused.
    """
    from autoscaler.actuator import Actuator
    from autoscaler.lease import Lease
    from autoscaler.loop import Autoscaler
    from kvrelay.launch.launcher import RayLauncher, require_gpus
    from kvrelay.launch.ray_cluster import RayCluster, local_cpus
    from kvrelay.launch.template import Template
    from kvrelay.models import resolve_model
    from kvrelay.process.loop_stall import LoopStalls
    from kvrelay.process.stop_request import StopRequest
    from kvrelay.security.credentials import Credentials
    from kvrelay.state.registry import Registry
    from kvrelay.worker.settings import WorkerSettings

    stop = StopRequest()
    sizes: dict[PoolName, int] = {
        "prefill": config.prefill.replicas,
        "decode": config.decode.replicas,
    }
    # Here, before anything starts; each worker does so on its own host
    resolve_model(config.model.path)
    settings = WorkerSettings(
        "", "decode", config.model.path, config.redis.url, config, pin=ray_address is None
    )
    credentials = Credentials.internal(config.security, "router")
    # Never that of an earlier process, whatever number it had.
    owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    standby = 0 if policy is None else policy.standby
    forks = ray_address is None and Template.suits(config)
    template = Template(config.decode.threads) if forks else None
    async with await Registry.connect(
        config.redis.url,
        loopback_only=config.listen.workers_on_loopback,
        confirm_replicas=config.redis.confirm_replicas,
    ) as registry:
        with (
            template or nullcontext(),
            RayCluster(
                ray_address, local_cpus(config, _largest(sizes, policy), standby)
            ) as cluster,
        ):
            if cluster.is_local:  # a larger one may yet grow
                require_gpus(config, cluster.gpus, standby)
            stop.install()  # only now: ray.init sets handlers of its own
            lease = Lease(registry, owner, sole=sole)
            with suppress(Unavailable):  # `lease.run` tries again
                await lease.renew()
            launcher = RayLauncher(
                settings, cluster, lease, template.path if template is not None else ""
            )
            actuator = Actuator(
                registry,
                launcher,
                sizes,
                lease=lease,
                credentials=credentials,
                rebalance=policy is not None and policy.rebalance,
                standby=standby,
            )
            stalls = LoopStalls("controller")
            runs = [
                lease.run(),
                actuator.run(),
                launcher.look_for_room(),
                _refused_by_all(launcher, registry),
                cluster.lost(),
                stalls.run(),
            ]
            if cluster.is_local:  # elsewhere nodes come and go, and another one may do better
                runs.append(_never_served(launcher, actuator))
            parts = [asyncio.create_task(one) for one in runs]
            if policy is not None:
                parts.append(asyncio.create_task(Autoscaler(registry, policy, lease).run()))
            stopped = asyncio.create_task(stop.drain.wait())
            done, pending = await asyncio.wait(
                {*parts, stopped}, return_when=asyncio.FIRST_COMPLETED
            )
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            if not cluster.is_lost:
                leaving, halted = (
                    asyncio.create_task(actuator.leave()),
                    asyncio.create_task(stop.halt.wait()),
                )
                await asyncio.wait({leaving, halted}, return_when=asyncio.FIRST_COMPLETED)
                halted.cancel()
                leaving.cancel()
                await asyncio.gather(leaving, halted, return_exceptions=True)
                await launcher.stop_all()
            for task in done:
                task.result()


async def _refused_by_all(launcher: RayLauncher, registry: Registry) -> None:
    """Raises why a worker cannot serve, unless others can: then it is its host's trouble, and the
    log says so.
    """
    while True:
        error = await launcher.refused()
        try:
            infos = await registry.workers()
        # Who serves is not known; the actuator asks for another worker once it is
        except Unavailable:
            continue
        if not any(info.state == "ready" for info in infos):
            raise error


async def _never_served(launcher: RayLauncher, actuator: Actuator) -> None:
    """Raises why no worker will serve, as long as none has: another start does not cure it, or
    several did not.
    """
    from kvrelay.launch.failed_start import FailedStarts

    starts = FailedStarts()
    while True:
        failed = await launcher.failed()
        error = None if actuator.has_served else starts.verdict(failed)
        if error is not None:
            raise error


def _largest(sizes: dict[PoolName, int], policy: AutoscalingPolicy | None) -> dict[PoolName, int]:
    """How many workers each pool may come to have, by its policy or by hand, and one that is to
    replace another.
    """
    largest = dict.fromkeys(sizes, _BY_HAND)
    for pool, size in sizes.items():
        bounds = policy.pool(pool) if policy is not None else None
        largest[pool] = max(size, _BY_HAND if bounds is None else bounds.max_replicas) + 1
    return largest
