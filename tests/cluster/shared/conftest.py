"""One real cluster for all tests of a session: Redis, Ray, 2 prefill and 2 decode workers, a
router.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest_asyncio
from support.running_cluster import ANY_PORT, RunningCluster, running_on

from kvrelay.config.schema import ClusterConfig


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster() -> AsyncIterator[RunningCluster]:
    # - not 60, that a raylet outlives its head
    os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = "8"  # noqa: SIM112
    config = ClusterConfig.model_validate(
        {
            "model": {"path": "demo", "dtype": "float32"},
            "kv": {"memory": "128MiB"},
            "prefill": {"replicas": 2, "chunk_tokens": 128},
            "decode": {"replicas": 2},
            # So that the path does not depend on how busy the machine is
            "slo": None,
            "listen": ANY_PORT,
        }
    )
    async with running_on(config) as running:
        yield running
