"""A Ray cluster on hosts of a world of their own, `kvrelay serve` on it, and this process as its
client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from support.certificates import DAY, tls_section
from support.cluster_status import first_status
from support.host_namespaces import Host
from support.tokens import Tokens

from kvrelay.process.child import family
from kvrelay.security.authority import write_certificates
from kvrelay.state.embedded_redis import find_redis_server
from kvrelay.wire.cluster import ClusterServiceStub, ClusterStatus, cluster_status_from_proto, pb

START_S = 300.0
_RAY_PORT = 6379
_REDIS_PORT = 6380
_WORKERS_AT_MOST = 2  # on a host
# Of Ray's head: how fast it takes a host for dead that says nothing any more. Ray's own choice adds
# up to a minute.
_HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}


class HostCluster:
    """`hosts[0]` has Ray's head, Redis, the controller and the router; workers are wherever Ray has
    room.
    """

    def __init__(self, folder: Path, transport: str) -> None:
        self.folder = folder
        self.hosts: dict[str, Host] = {}  # that run, by address
        self._numbers = iter(range(1, 250))
        self._environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_TMPDIR": str(folder / "scratch"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_metrics_collection": "0",
            "RAY_prestart_worker_first_driver": "0",
            "PYTHONPATH": os.pathsep.join(sys.path[1:]),
        }
        self._password = secrets.token_hex(16)
        self._transport = transport
        self._exits = contextlib.AsyncExitStack()

    # Hosts

    async def boot(self) -> Host:
        """A new host, not yet in Ray's cluster."""
        number = next(self._numbers)
        host = Host(number, self.folder)
        self._exits.push_async_callback(host.off)
        await host.boot()
        self.hosts[host.address] = host
        return host

    async def lose(self, host: Host) -> None:
        """Its cable is pulled, then all its processes are killed, so that nobody hears of that."""
        await host.unplug()
        host.kill()
        del self.hosts[host.address]

    def lose_raylet(self, host: Host) -> None:
        """Ray's daemon there is killed, and nothing else."""
        host.kill_only("raylet")
        del self.hosts[host.address]

    async def join(self, host: Host) -> None:
        """Makes it a Ray node, the first one Ray's head."""
        place: tuple[str, ...] = ("--address", f"{self.head.address}:{_RAY_PORT}")
        if host is self.head:
            place = (
                "--head",
                f"--port={_RAY_PORT}",
                "--include-dashboard=false",
                "--dashboard-host=127.0.0.1",
            )
        await host.run(
            *(
                str(Path(sys.executable).with_name("ray")),
                "start",
                *place,
                f"--node-ip-address={host.address}",
            ),
            *(
                f"--num-cpus={_WORKERS_AT_MOST}",
                f"--object-store-memory={80 * 2**20}",
                "--disable-usage-stats",
            ),
            environment={**self._environment, **_HEALTH},
        )

    @property
    def head(self) -> Host:
        return next(iter(self.hosts.values()))

    async def start_redis(self) -> str:
        """On the head's address; returns the URL."""
        where = (
            "--bind",
            self.head.address,
            "--port",
            str(_REDIS_PORT),
            "--requirepass",
            self._password,
        )
        await self.head.start(str(find_redis_server()), *where, "--save", "", "--appendonly", "no")
        return f"redis://:{self._password}@{self.head.address}:{_REDIS_PORT}/0"

    # kvrelay

    @asynccontextmanager
    async def serving(
        self, redis_url: str, prefill: int = 2, decode: int = 2
    ) -> AsyncIterator[Serving]:
        """`kvrelay serve` on the head's host, until it serves and then until this is left."""
        certs = self.folder / f"certs-{secrets.token_hex(4)}"
        write_certificates(certs, (self.head.address,), DAY)
        tokens = Tokens(self.folder / "tokens.yaml")
        user, operator = tokens.add("user"), tokens.add("operator", roles=["admin"])
        endpoints = dict.fromkeys(("grpc", "http", "admin"), f"{self.head.address}:0")
        config = {
            "model": {"path": "demo", "dtype": "float32"},
            # The same prompts come again and again
            "kv": {"memory": "64MiB", "prefix_cache": False},
            "prefill": {"replicas": prefill, "chunk_tokens": 128},
            "decode": {"replicas": decode},
            "transfer": {"transport": self._transport},
            "redis": {"url": redis_url},
            "listen": {**endpoints, "worker_host": "auto"},
            "security": {"tls": tls_section(certs), "tokens_file": str(tokens.path)},
        }
        path = self.folder / "cluster.yaml"
        path.write_text(json.dumps(config))
        command = (
            sys.executable,
            "-m",
            "kvrelay.cli.main",
            "serve",
            "-c",
            str(path),
            "--ray-address",
            "auto",
        )
        process = await self.head.start(
            *command, environment=self._environment, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            line = (await process.stdout.readline()).decode()
        ready = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if not ready:
            raise RuntimeError(f"kvrelay serve ended with {await process.wait()}; 1.log says why")
        ca = grpc.ssl_channel_credentials((certs / "ca.pem").read_bytes())

        def channel(endpoint: str, token: str) -> grpc.aio.Channel:
            both = grpc.composite_channel_credentials(ca, grpc.access_token_call_credentials(token))
            return grpc.aio.secure_channel(ready[endpoint], both)

        async with channel("grpc", user) as asking, channel("admin", operator) as operating:
            yield Serving(asking, ClusterServiceStub(operating), redis_url)
        os.kill(family(process.pid)[1], signal.SIGTERM)  # not nsenter, which passes nothing on
        assert await process.wait() == 0, "kvrelay serve did not end well"

    async def __aenter__(self) -> HostCluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()


class Serving:
    """What clients and operators have of the cluster."""

    def __init__(
        self, channel: grpc.aio.Channel, admin: ClusterServiceStub, redis_url: str
    ) -> None:
        self.channel = channel
        self.redis_url = redis_url
        self._admin = admin

    async def status(self) -> ClusterStatus:
        return cluster_status_from_proto(
            await self._admin.GetStatus(pb.GetStatusRequest(), timeout=30)
        )

    async def scale(self, **sizes: int) -> None:
        await self._admin.SetPoolSize(pb.SetPoolSizeRequest(**sizes), timeout=30)

    async def until(self, holds: Callable[[ClusterStatus], bool], what: str) -> ClusterStatus:
        return await first_status(self.status, holds, what, START_S)


def hosts_of(status: ClusterStatus, pool: str) -> list[str]:
    """Addresses of the hosts of the pool's workers that are ready, one for each worker."""
    (found,) = (one for one in status.pools if one.name == pool)
    return [one.host for one in found.workers if one.state == "ready"]
