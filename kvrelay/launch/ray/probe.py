"""Asks an existing Ray whether this process can use it."""

from __future__ import annotations

import socket

import grpc
import ray
from ray._private.gcs_utils import create_gcs_channel
from ray.core.generated import gcs_pb2, gcs_service_pb2, gcs_service_pb2_grpc

from kvrelay.errors import Unavailable

_CONNECT_S = 5.0


def check_ray(head: str) -> None:
    """Raises Unavailable unless a Ray of this version answers at `head` and this machine is one of
    its nodes. `ray.init` would retry forever.
    """
    with create_gcs_channel(head) as channel:
        try:
            gcs = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
            found = gcs.CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=_CONNECT_S)
            nodes = gcs.GetAllNodeInfo(
                gcs_service_pb2.GetAllNodeInfoRequest(), timeout=_CONNECT_S
            ).node_info_list
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise Unavailable(
                    f"Ray at {head} requires a token: set RAY_AUTH_MODE=token, and write the token "
                    "to ~/.ray/auth_token or to the file that RAY_AUTH_TOKEN_PATH names"
                ) from None
            raise Unavailable(
                f"no Ray answers at {head}: {error.details()}; give the address of Ray's head"
            ) from None
    if found.ray_version != ray.__version__:
        raise Unavailable(
            f"Ray at {head} has version {found.ray_version}, and this process has "
            f"{ray.__version__}; install the same version"
        )
    alive = [node for node in nodes if node.state == gcs_pb2.GcsNodeInfo.ALIVE]
    if not any(_is_here(node.node_manager_address) for node in alive):
        raise Unavailable(
            f"this machine is not one of the {len(alive)} nodes of Ray at {head}; add it with "
            f"`ray start --address {head}`, or run this command on one of the nodes"
        )


def _is_here(host: str) -> bool:
    """Whether `host` is an address of this machine."""
    with socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True
