"""A cluster whose every connection is TLS: the same tokens, and nothing that listens in the
clear.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import grpc
import httpx
import pytest
from support.certificates import made_by_the_command, tls_section
from support.running_cluster import ANY_PORT, RunningCluster
from support.tokens import Tokens, bearer

from kvrelay.cli.views import render
from kvrelay.client import AsyncClient, Completion
from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import PermissionDenied
from kvrelay.launch.local_cluster import LocalCluster
from kvrelay.wire.cluster import ClusterServiceStub, pb

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

DENIED = grpc.StatusCode.PERMISSION_DENIED
HTTPS_ONLY = b"This port speaks HTTPS only; begin with https://.\n"
TURN = [40 + i % 90 for i in range(50)]  # so short that the decode worker prefills it by itself


async def answer(
    client: AsyncClient, token_ids: list[int], temperature: float = 0.0, max_tokens: int = 24
) -> Completion:
    return await client.generate(
        token_ids=token_ids, max_tokens=max_tokens, temperature=temperature, seed=7, ignore_eos=True
    ).result()


async def conversation(client: AsyncClient) -> list[Completion]:
    """Two turns, of which the second begins with what the decode worker alone holds, and a drawn
    answer.
    """
    first = await answer(client, TURN, max_tokens=150)
    second = await answer(client, [*TURN, *first.token_ids, *range(50, 200)])
    return [first, second, await answer(client, list(range(200)), temperature=1.0)]


def shown_by(folder: Path, role: str, token: str = "") -> grpc.ChannelCredentials:
    """The role's certificate, and the token with each call."""
    names = ("ca.pem", f"{role}-key.pem", f"{role}.pem")
    credentials = grpc.ssl_channel_credentials(*((folder / name).read_bytes() for name in names))
    if not token:
        return credentials
    return grpc.composite_channel_credentials(
        credentials, grpc.access_token_call_credentials(token)
    )


def listening_ports(pid: int) -> set[int]:
    """TCP ports that the process listens on."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        link = str(fd.readlink())
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                found.add(int(columns[1].rpartition(":")[2], 16))
    return found


async def answers_in_the_clear(address: str) -> bytes:
    """What the port says to HTTP without TLS, in version 1 and in version 2, which gRPC is."""
    said = b""
    for words in (
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5),
    ):
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(words)
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionError):
                said += await reader.read()
        writer.close()
    return said


@pytest.mark.long
async def test_tokens_are_those_of_a_plaintext_cluster_and_no_port_speaks_in_the_clear(
    cluster: RunningCluster, tmp_path: Path
) -> None:
    expected = await conversation(cluster.client)
    folder = made_by_the_command(tmp_path / "certs")
    tokens = Tokens(tmp_path / "tokens.yaml")
    user, operator = tokens.add("user"), tokens.add("operator", roles=["admin"])
    router_pair = {"cert": str(folder / "router.pem"), "key": str(folder / "router-key.pem")}
    public = {**router_pair, "client_ca": str(folder / "ca.pem")}
    config = ClusterConfig.model_validate(
        {
            "model": {"path": "demo", "dtype": "float32"},
            "kv": {"memory": "64MiB"},
            "prefill": {"chunk_tokens": 128},
            "transfer": {"transport": "grpc"},
            "listen": ANY_PORT,
            "security": {
                "tls": tls_section(folder, public=public),
                "tokens_file": str(tokens.path),
            },
        }
    )
    async with (
        LocalCluster(config, quiet=True) as local,
        AsyncClient(local.endpoints.grpc, tls=shown_by(folder, "client"), token=user) as client,
        grpc.aio.secure_channel(
            local.endpoints.admin, shown_by(folder, "admin", operator)
        ) as channel,
    ):
        running = RunningCluster(local, client, ClusterServiceStub(channel))
        await running.settled(prefill=1, decode=1)
        found = await conversation(client)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        ledgers = [one.ledger for one in found if one.ledger is not None]
        assert [one.handoff and one.handoff.transport for one in ledgers] == [None, "grpc", "grpc"]
        assert any(phase == "fetch" for phase, _ in ledgers[1].phases), (
            "a worker fetched from another, by TLS too"
        )

        # These certificates end within a day, of which an operator is told.
        status = await running.status()
        assert f"{folder}/router.pem expires in 2" in status.router.certificate_note
        for pool in status.pools:
            for worker in pool.workers:
                assert f"{folder}/worker.pem expires in 2" in worker.load.certificate_note
        console = render.console()
        with console.capture() as shown:
            console.print(render.status_view(status))
        assert shown.get().count(".pem expires in") == 3

        # Who is not what the endpoint is for: with the right token, and with the cluster's own
        # certificates.
        for role, code in (
            ("client", DENIED),
            ("router", DENIED),
            ("worker", DENIED),
            ("admin", grpc.StatusCode.OK),
        ):
            async with grpc.aio.secure_channel(
                local.endpoints.admin, shown_by(folder, role, operator)
            ) as stranger:
                call = ClusterServiceStub(stranger).GetStatus(pb.GetStatusRequest(), timeout=30)
                assert await call.code() is code, role
        for role in ("router", "worker"):
            async with AsyncClient(
                local.endpoints.grpc, tls=shown_by(folder, role), token=user
            ) as stranger:
                with pytest.raises(PermissionDenied):
                    await stranger.models()

        trusted = ssl.create_default_context(cafile=folder / "ca.pem")
        trusted.load_cert_chain(folder / "client.pem", folder / "client-key.pem")
        async with httpx.AsyncClient(verify=trusted, headers=bearer(user)) as http:
            assert local.endpoints.http.startswith("https://")
            assert (await http.get(f"{local.endpoints.http}/v1/models")).status_code == 200

        endpoints = {
            "grpc": local.endpoints.grpc,
            "http": local.endpoints.http[8:],
            "admin": local.endpoints.admin,
        }
        workers = [*await running.workers("prefill"), *await running.workers("decode")]
        (router,) = local._routers
        assert listening_ports(router.children[0].process.pid) == {
            int(one.rpartition(":")[2]) for one in endpoints.values()
        }
        for worker in workers:
            assert int(worker.address.rpartition(":")[2]) in listening_ports(worker.pid)
        said = await answers_in_the_clear(endpoints.pop("http"))
        assert said.startswith(b"HTTP/1.1 400 "), said
        assert said.partition(b"\r\n\r\n")[2] == HTTPS_ONLY, "and nothing of the cluster"
        for address in (*endpoints.values(), *(worker.address for worker in workers)):
            said = await answers_in_the_clear(address)
            assert b"HTTP" not in said, (address, said)
            assert not said or said[:1] == b"\x15", "no more than TLS's word for: this is no TLS"
