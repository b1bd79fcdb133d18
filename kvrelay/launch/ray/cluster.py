"""The Ray that workers run on: an existing Ray cluster, possibly of many machines, or a local Ray
that this process starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType

import ray
from ray._private import services, state
from ray._private.authentication.authentication_token_setup import (
    maybe_enable_token_auth_if_token_available,
)

# The module is compiled, and its stub lacks this name.
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import Unavailable
from kvrelay.launch.host_placement import Node
from kvrelay.launch.ray.address import AUTO, check_ray_address
from kvrelay.launch.ray.probe import check_ray
from kvrelay.process.child import command_of, family, kill
from kvrelay.process.owned_folder import SHORT_PARENT, OwnedFolder
from kvrelay.process.telemetry import get_logger
from kvrelay.types.workers import PoolName

_POLL_S = 1.0
# Ray's minimum; KV never passes through the object store.
_OBJECT_STORE_BYTES = 80 * 2**20
_QUIET_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's default of 30 s is too short for a machine whose cores are all busy.
    "RAY_gcs_server_port_wait_time_s": "60",
}
# On a busy machine Ray's gcs_server hangs at its start at times, or its raylet takes too long. Ray
# then starts again.
_STARTS = 2
_PROCESSES = ("gcs_server", "raylet")
# Longest wait for the end of a process that was killed.
_KILL_MS = 10_000
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"

log = get_logger(__name__)


class RayCluster:
    """Context manager. Inside it, this process is Ray's driver, and the workers end with this
    process.

    Raises ConfigError for an invalid address, and Unavailable if no Ray accepts this process.
    """

    def __init__(self, address: str | None = None, num_cpus: float | None = None) -> None:
        """Without an address, starts a local Ray that offers `num_cpus` logical CPUs."""
        if address is not None:
            check_ray_address(address)
        self._address = address
        self._num_cpus = num_cpus
        self._exits = contextlib.ExitStack()
        self._own_token = False
        # Process id of a local Ray's raylet.
        self._raylet: int | None = None

    def __enter__(self) -> RayCluster:
        for name, value in _QUIET_RAY.items():
            os.environ.setdefault(name, value)
        try:
            if self._address is None:
                self._start()
            else:
                self._connect(self._address)
        except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
            self.__exit__(None, None, None)
            where = (
                "Ray did not start"
                if self._address is None
                else f"Ray at {self._address} cannot be used"
            )
            raise Unavailable(f"{where}: {error}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ray.shutdown()
        self._exits.close()
        if self._own_token:
            del os.environ[_TOKEN_PATH]
            # This process may use another Ray later, with another token.
            AuthenticationTokenLoader.instance().reset_cache()

    @property
    def is_local(self) -> bool:
        """Whether Ray has one node: this machine, used by no other process."""
        return self._address is None

    @property
    def gpus(self) -> float:
        """Number of GPUs that Ray finds."""
        return float(ray.cluster_resources().get("GPU", 0))

    def nodes(self) -> list[Node]:
        """Returns the nodes that accept new actors, as Ray reports them now. Blocks the calling
        thread until Ray answers.
        """
        free: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
        leaving = state.state.get_draining_nodes()
        return [
            Node(node_id, node["NodeManagerAddress"], node["Resources"], free[node_id])
            for node in ray.nodes()
            if node["Alive"] and (node_id := node["NodeID"]) in free and node_id not in leaving
        ]

    @property
    def is_lost(self) -> bool:
        """Whether the raylet of a local Ray has ended. Then no worker can be started or stopped any
        more, and the workers end by themselves.
        """
        return self._raylet is not None and command_of(self._raylet) != "raylet"

    async def lost(self) -> None:
        """Waits until `is_lost`, then raises Unavailable."""
        while True:
            if self.is_lost:
                raise Unavailable("Ray's raylet process ended; the workers end with it")
            await asyncio.sleep(_POLL_S)

    def _start(self) -> None:
        folder = self._exits.enter_context(OwnedFolder("ray", SHORT_PARENT)).path
        if _TOKEN_PATH not in os.environ and "RAY_AUTH_TOKEN" not in os.environ:
            # Every process that connects to Ray can run code, so a local Ray gets a token. Ray's
            # default is a token in the home folder, which is as readable as the home folder and
            # shared by all Rays of this user.
            path = folder / "token"
            # Ray makes the folder readable for all users.
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(32))
            os.environ[_TOKEN_PATH] = str(path)
            self._own_token = True
        before = set(family(os.getpid()))
        for left in reversed(range(_STARTS)):
            try:
                ray.init(
                    address="local",
                    num_cpus=self._num_cpus,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    _temp_dir=str(folder),
                    logging_level="error",
                    namespace="kvrelay",
                )
                break
            # Ray raises plain Exception for a raylet that takes too long.
            except Exception as error:
                _end_ray(before)
                if not left:
                    raise RuntimeError(
                        f"Ray does not start: {error}, {_STARTS} times. If the machine is busy, "
                        "try again later; otherwise look at its limits on memory, processes "
                        "(ulimit -u) and open files (ulimit -n)"
                    ) from error
                log.warning("ray_starts_again", reason=str(error))
        self._raylet = next(pid for pid in family(os.getpid()) if command_of(pid) == "raylet")

    def _connect(self, address: str) -> None:
        if address == AUTO:
            # `ray.init` does the same.
            maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        check_ray(services.canonicalize_bootstrap_address_or_die(address))
        ray.init(address=address, logging_level="error", namespace="kvrelay")


def _end_ray(before: Collection[int]) -> None:
    """Ends the processes of a start that failed, which Ray leaves behind, so that the next start
    does not run beside them. `before` are the processes before the start.
    """
    ray.shutdown()
    for pid in family(os.getpid()):
        if pid not in before and command_of(pid) in _PROCESSES:
            kill(pid, _KILL_MS)


def local_cpus(
    pools: Sequence[tuple[ClusterConfig, Mapping[PoolName, int], int]],
) -> float:
    """Returns the number of logical CPUs for a local Ray, enough for the largest pools that the
    configuration allows. `pools`: of each model its configuration, the most workers of each pool
    and the standby workers.

    Workers on one machine share cores, so workers need not wait if there are fewer cores than
    workers.
    """
    wanted = sum(
        most["prefill"] * config.prefill.resources.num_cpus
        + (most["decode"] + standby) * config.decode.resources.num_cpus
        for config, most, standby in pools
    )
    # Ray takes whole numbers only.
    return float(max(os.cpu_count() or 1, math.ceil(wanted)))
