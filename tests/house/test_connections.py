"""Where the cluster opens ports and connections; what is new has to be thought about, as TLS is for
all of them.
"""

from __future__ import annotations

import re

from support.source import PACKAGES, ROOT

NOT_OF_A_CLUSTER = ("kvrelay/v1/", "kvrelay/bench/", "kvrelay/loadtest/", "kvrelay/verify/")
OPENS = re.compile(
    r"\b(insecure_channel|secure_channel|add_insecure_port|add_secure_port|open_connection|open_unix_connection"
    r"|create_connection|create_server|start_server|socket\.socket|socket_for)\("
)
KNOWN = {
    "kvrelay/process/tcp_address.py": "sends nothing, takes nothing: makes the sockets that "
    "others here bind",
    "kvrelay/process/held_port.py": "sends nothing, takes nothing: whether the addresses of "
    "the listeners are free",
    "kvrelay/process/shared_port.py": "sends nothing, takes nothing: claims the addresses of the "
    "listeners for the processes of one router",
    "router/sibling_processes.py": "a Unix socket in a folder that only this user enters",
    "kvrelay/launch/checks/preflight.py": "sends nothing: whether loopback answers",
    "kvrelay/launch/ray/probe.py": "sends nothing: whether an address is one of this machine",
    "kvrelay/launch/worker_template.py": "a Unix socket in a folder of this user's, which none "
    "other can enter",
    "kvrelay/launch/template_process.py": "the same socket, taken over from the parent",
    "kvrelay/launch/forked_worker.py": "the same socket, of this machine's template",
    "kv_transfer/transports/interface.py": "sends nothing: asks the kernel for addresses of "
    "interfaces",
    "kvrelay/security/grpc_tls.py": "all within the cluster, and the listeners: TLS where there "
    "are credentials",
    "kvrelay/client/base_client.py": "a client's, as it was told",
    "kvrelay/client/admin.py": "an operator's, as it was told",
    "router/api/http/server.py": "HTTP: uvicorn's socket, with an SSL context where there are "
    "credentials",
    "kvrelay/vllm_engine/nixl/side_channel.py": "sends nothing: keeps a port for vllm-nixl, "
    "which is only taken when asked for by name",
    "kvrelay/engine/parallel/group.py": "the store of one worker's ranks: on loopback, for "
    "processes that it started",
    "kv_transfer/transports/group_outbound.py": "the store of gloo and nccl, which are only "
    "taken when asked for by name",
}


def test_ports_and_connections_are_opened_in_known_places() -> None:
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if not name.startswith(NOT_OF_A_CLUSTER) and OPENS.search(path.read_text()):
                found.add(name)
    assert found == set(KNOWN)
