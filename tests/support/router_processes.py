"""A router in processes of its own, with a Redis and fake workers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from support import fake_worker

Process = asyncio.subprocess.Process


async def start(*words: str, stdout: int | None = None, stderr: int | None = None) -> Process:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return await asyncio.create_subprocess_exec(
        sys.executable, *words, env=env, stdout=stdout, stderr=stderr
    )


@dataclass
class RouterCluster:
    redis_url: str
    processes: dict[str, Process] = field(default_factory=dict)
    grpc: str = ""
    http: str = ""
    admin: str = ""
    # Of tenants, by their names.
    tokens: dict[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = ("-m", "kvrelay.cli.main")

    async def add_worker(self, name: str) -> None:
        self.processes[name] = await start(fake_worker.__file__, name, self.redis_url)

    async def add_router(self, config: Path) -> None:
        router = await start(
            *self.program, "router", "-c", str(config), stdout=asyncio.subprocess.PIPE
        )
        self.processes["router"] = router
        assert router.stdout is not None
        line = (await asyncio.wait_for(router.stdout.readline(), 120)).decode()
        assert line.startswith("kvrelay ready grpc=")
        self.grpc, self.http, self.admin = (word.partition("=")[2] for word in line.split()[2:])

    async def close(self) -> None:
        for one in self.processes.values():
            if one.returncode is None:
                one.kill()
            await one.wait()


def cluster_file(folder: Path, redis_url: str, **sections: object) -> Path:
    """Of a router over one decode worker."""
    config = {
        "redis": {"url": redis_url},
        "prefill": {"replicas": 0},
        "listen": {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "admin": "127.0.0.1:0"},
    } | sections
    file = folder / "cluster.yaml"
    file.write_text(json.dumps(config))
    return file


async def running_by_process(http: str, token: str | None = None) -> dict[int, int]:
    """Requests that run, by the number of the process of the router at this URL."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=http, timeout=60, headers=headers) as client:
        text = (await client.get("/metrics")).text
    return {
        int(one.labels["router_process"]): int(one.value)
        for family in text_string_to_metric_families(text)
        if family.name == "kvrelay_num_requests_running"
        for one in family.samples
        if one.labels["pool"] == "router"
    }
