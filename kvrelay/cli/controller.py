"""`kvrelay controller`: starts, watches and scales the workers of a cluster."""

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
from kvrelay.cli.options.cluster import Config, LogLevel, RayAddress
from kvrelay.cli.serve import require_shared_redis, set_log_level
from kvrelay.errors import Unavailable

if TYPE_CHECKING:
    from autoscaler.actuator import Actuator
    from kvrelay.config.autoscaling_policy import AutoscalingPolicy
    from kvrelay.config.schema import ClusterConfig
    from kvrelay.launch.launcher import RayLauncher
    from kvrelay.state.registry import Registry
    from kvrelay.types.workers import PoolName

# Workers of a pool without a policy that a local Ray has room for after `kvrelay scale`: one for
# each core, and on small machines as many as a trial of scaling needs.
_BY_HAND = max(4, os.cpu_count() or 1)


@requires_cluster_extra
def controller(
    config: Config = None,
    ray_address: RayAddress = None,
    log_level: LogLevel = None,
    sole: Annotated[
        bool,
        typer.Option("--sole", hidden=True, help="Do not wait for the lease of other controllers."),
    ] = False,
) -> None:
    """Run and scale the workers of a cluster as Ray actors. `kvrelay serve` starts a controller.

    One of several controllers on the same Redis leads. The others stand by until its lease ends.

    redis.url names the Redis that all components share. The first SIGTERM drains the workers; the
    second ends them at once.

    Example: kvrelay controller -c cluster.yaml --ray-address auto
    """
    from kvrelay.config.config_file import load_config, load_policy
    from kvrelay.launch.ray_address import check_ray_address, check_reachable
    from kvrelay.process.telemetry import configure_logging

    loaded = load_config(config)
    if ray_address is not None:
        check_ray_address(ray_address)
        check_reachable(loaded)
    require_shared_redis(loaded.redis.url, "controller")
    policy = None if loaded.autoscaling is None else load_policy(Path(loaded.autoscaling))
    set_log_level(log_level)
    configure_logging()
    asyncio.run(_control(loaded, policy, ray_address, sole))


async def _control(
    config: ClusterConfig, policy: AutoscalingPolicy | None, ray_address: str | None, sole: bool
) -> None:
    """Runs until a signal and the drain of all workers, or a second signal.

    Raises the error that prevents workers from starting, for example ModelRefused.
    """
    from autoscaler.actuator import Actuator
    from autoscaler.lease import Lease
    from autoscaler.look_ahead import look_ahead
    from autoscaler.loop import Autoscaler
    from kvrelay.launch.launcher import RayLauncher, require_gpus
    from kvrelay.launch.ray_cluster import RayCluster, local_cpus
    from kvrelay.launch.worker_template import Template
    from kvrelay.models import resolve_model
    from kvrelay.process.loop_stall import LoopStalls
    from kvrelay.process.stop_request import StopRequest
    from kvrelay.security.credentials import Credentials
    from kvrelay.state.registry import Registry
    from kvrelay.worker.runtime.settings import WorkerSettings

    stop = StopRequest()
    sizes: dict[PoolName, int] = {
        "prefill": config.prefill.replicas,
        "decode": config.decode.replicas,
    }
    # Before anything starts. Each worker resolves the model on its own host again.
    resolve_model(config.model.path)
    settings = WorkerSettings(
        "", "decode", config.model.path, config.redis.url, config, pin=ray_address is None
    )
    credentials = Credentials.internal(config.security, "router")
    # Differs from the owner of any earlier process, also of one with the same process id.
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
            # A cluster of several nodes may still grow.
            if cluster.is_local:
                require_gpus(config, cluster.gpus, standby)
            # After ray.init, which sets handlers of its own.
            stop.install()
            lease = Lease(registry, owner, sole=sole)
            # `lease.run` tries again.
            with suppress(Unavailable):
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
            # On several nodes, another node may succeed where one failed.
            if cluster.is_local:
                runs.append(_never_served(launcher, actuator))
            parts = [asyncio.create_task(one) for one in runs]
            if policy is not None:
                ahead = look_ahead(policy, config)
                autoscaler = Autoscaler(registry, policy, lease, look_ahead=ahead)
                parts.append(asyncio.create_task(autoscaler.run()))
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
    """Raises the error of a worker that cannot serve, unless other workers serve in its role. In
    that case the cause is the worker's host, and the log has the error.
    """
    while True:
        refused = await launcher.refused()
        try:
            infos = await registry.workers()
        # Without Redis, it is unknown which workers serve. The actuator retries later.
        except Unavailable:
            continue
        if refused.concerns_all(infos):
            raise refused.error


async def _never_served(launcher: RayLauncher, actuator: Actuator) -> None:
    """Raises an error if no worker has served yet and the failure is permanent, or several starts
    have failed.
    """
    from kvrelay.launch.failed_start import FailedStarts

    starts = FailedStarts()
    while True:
        failed = await launcher.failed()
        error = None if actuator.has_served else starts.verdict(failed)
        if error is not None:
            raise error


def _largest(sizes: dict[PoolName, int], policy: AutoscalingPolicy | None) -> dict[PoolName, int]:
    """Returns the most workers that each pool may have by its policy or by `kvrelay scale`, plus
    one replacement.
    """
    largest = dict.fromkeys(sizes, _BY_HAND)
    for pool, size in sizes.items():
        bounds = policy.pool(pool) if policy is not None else None
        largest[pool] = max(size, _BY_HAND if bounds is None else bounds.max_replicas) + 1
    return largest
