"""The target of a load test and what is found out about it."""

from __future__ import annotations

import grpc
from support.scripted_router import ScriptedRouter

from kvrelay.client.connection import Connection
from kvrelay.loadtest.senders.target import open_target
from kvrelay.types.control_plane import RouterLoad
from kvrelay.wire import cluster, inference

BLOCK_SIZE = 8


class ScriptedCluster(cluster.ClusterServiceServicer):
    async def GetStatus(
        self, request: cluster.pb.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> object:
        status = cluster.ClusterStatus(
            "demo", "ready", (), (), RouterLoad("router"), 1, BLOCK_SIZE, "ok"
        )
        return cluster.cluster_status_to_proto(status)


async def test_opening_a_target_does_not_block_the_event_loop() -> None:
    """The admin listener runs on the loop that asks it, so a blocking call would get no answer."""
    server = grpc.aio.server()
    inference.add_InferenceServiceServicer_to_server(ScriptedRouter(), server)
    cluster.add_ClusterServiceServicer_to_server(ScriptedCluster(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with open_target(address, 20.0, address, None, Connection()) as target:
            assert target.block_tokens == BLOCK_SIZE
    finally:
        await server.stop(None)
