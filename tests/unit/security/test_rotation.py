"""Certificates are replaced while everything runs, and one ends in mid-run: real workers and
certificates.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs
from support.certificates import DAY, Certificates, all_roles
from support.transfer_ends import LAYOUT
from support.worker_harness import Session, Workers, workers

from kv_transfer.channels import Channels
from kvrelay.config.schema import ClusterConfig
from kvrelay.security.credentials import Credentials
from kvrelay.security.expiry import notice
from kvrelay.security.https import ssl_context
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.types.workers import WorkerInfo
from kvrelay.wire.status import error_from_rpc
from kvrelay.worker_messages import Failed, HandedOff, Prefill, Reserve, Reserved, RunLocal
from router.runtime.sessions import WorkerSession

PROMPT = tuple(range(2, 63))
SHORT = timedelta(seconds=3)


def config(made: Certificates) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": {"dtype": "float32"},
            "kv": {"block_size": 16, "memory": "4MiB"},
            "prefill": {"chunk_tokens": 32},
            "decode": {"chunk_tokens": 32},
            "transfer": {"transport": "grpc"},
            "security": made.security.model_dump(),
        }
    )


def spec(request_id: str, max_tokens: int = 8) -> SequenceSpec:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=5, ignore_eos=True)
    return SequenceSpec(request_id, 0, PROMPT, len(PROMPT), params)


async def until_published(running: Workers, holds: Callable[[WorkerInfo], bool]) -> WorkerInfo:
    """What the first worker says once it is so of both."""
    async with asyncio.timeout(30):
        while True:
            infos = await running.registry.workers()
            if all(holds(info) for info in infos):
                return infos[0]
            await asyncio.sleep(0.05)


async def relayed(prefill: Session, decode: Session, one: SequenceSpec) -> HandedOff | Failed:
    """What becomes of a hand-off between the two."""
    await decode.send(Reserve(one, 10.0, "prefill-0"))
    while not isinstance(reserved := await decode.event(), Reserved):
        pass  # tokens of the one before
    await prefill.send(Prefill(one, replace(reserved.target, transport="grpc")))
    while not isinstance(event := await prefill.event(), HandedOff | Failed):
        pass
    return event


class Tries:
    """Stands for a router; counts how often it finds the worker."""

    found = 0

    def worker_found(self, info: WorkerInfo) -> None:
        self.found += 1

    def worker_lost(self, worker_id: str, expected: bool) -> None: ...

    def worker_said(self, worker_id: str, event: object) -> None: ...


async def tries_of_a_router(info: WorkerInfo, credentials: Credentials | None) -> None:
    """Three, to no avail."""
    listener = Tries()
    session = WorkerSession(info, "router", listener, credentials)
    for _ in range(3):
        assert not await session._converse()
    assert listener.found == 0


@pytest.mark.long
async def test_a_certificate_that_ends_in_mid_run(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    made = all_roles(tmp_path, ("router", "worker"))
    async with workers(tiny_model("llama"), config(made), "decode-0", "prefill-0") as running:
        with capture_logs() as logs:
            cert, _ = made.issue("worker", lifetime=SHORT)
            ends = datetime.now(UTC) + SHORT
            decode, prefill = await running.session("decode-0"), await running.session("prefill-0")
            info = await until_published(
                running, lambda info: " expired at " in info.load.certificate_note
            )
            assert datetime.now(UTC) > ends - timedelta(seconds=1)
            assert info.load.certificate_note.startswith(f"{cert} expired at {ends:%Y-%m-%d %H:%M}")

            # What stands goes on: both ways, from tokens to drains.
            await decode.send(RunLocal(spec("stream", 40)))
            assert len(await decode.answer()) == 40
            # What is new is refused, by name of the reason, between workers too.
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await running.session("decode-0")
            assert error_from_rpc(refused.value).message.startswith(
                "TLS handshake failed: CERTIFICATE_VERIFY_FAILED"
            )
            failed = await relayed(prefill, decode, spec("refused"))
            assert isinstance(failed, Failed)
            assert "certificate has expired" in failed.message
            await tries_of_a_router(info, Credentials.internal(made.security, "router"))
            refusals = [line for line in logs if line["event"] == "session_failed"]
            assert [line["log_level"] for line in refusals] == ["warning"], "however often it tries"
            assert refusals[0]["reason"].endswith(
                "CERTIFICATE_VERIFY_FAILED: certificate has expired"
            )
            told = [line["reason"] for line in logs if line["event"] == "certificate_expiring"]
            assert len(told) == 4, "each worker: soon, then over"
            assert [" expires in " in reason for reason in told] == [True, True, False, False]
            assert all(reason.startswith(str(cert)) for reason in told)

            made.issue("worker")
            assert isinstance(
                await relayed(prefill, await running.session("decode-0"), spec("again")), HandedOff
            )
            await until_published(running, lambda info: info.load.certificate_note == "")
    assert [line["event"] for line in logs].count("certificate_valid") >= 1


async def test_workers_take_new_certificates_of_a_new_ca(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """All is replaced at once; sessions of the time before go on."""
    made = all_roles(tmp_path, ("router", "worker"))
    async with workers(tiny_model("llama"), config(made), "decode-0", "prefill-0") as running:
        decode, prefill = await running.session("decode-0"), await running.session("prefill-0")
        assert isinstance(await relayed(prefill, decode, spec("before")), HandedOff)
        all_roles(tmp_path, ("router", "worker"))
        assert isinstance(await relayed(prefill, decode, spec("between")), HandedOff)
        decode, prefill = await running.session("decode-0"), await running.session("prefill-0")
        assert isinstance(await relayed(prefill, decode, spec("after")), HandedOff)


def test_broken_files_change_nothing_but_the_log(tmp_path: Path) -> None:
    made = all_roles(tmp_path, ("worker",))
    credentials = Credentials.internal(made.security, "worker")
    assert credentials is not None
    before = credentials.current()
    other = made.authority.issue("worker", (), DAY)
    with capture_logs() as logs:
        (tmp_path / "worker.pem").write_bytes(other.certificate_pem)  # its key comes later
        assert credentials.current() is before
        assert credentials.current() is before
        assert "is not the key of the certificate" in credentials.trouble()
        (tmp_path / "worker-key.pem").write_bytes(other.key_pem)
        after = credentials.current()
        assert credentials.trouble().endswith("UTC"), "it expires in a day"
    assert after.chain == other.certificate_pem
    assert [line["event"] for line in logs if line["log_level"] == "warning"].count(
        "certificate_rejected"
    ) == 1
    (tmp_path / "worker.pem").unlink()
    assert credentials.current() is after


@pytest.mark.parametrize(
    ("left", "says"),
    [
        (timedelta(days=15), ""),
        (timedelta(days=13, hours=1), "/w.pem expires in 13 days, at 2030-01-01 00:00:00 UTC"),
        (timedelta(hours=5), "/w.pem expires in 5 hours, at 2030-01-01 00:00:00 UTC"),
        (timedelta(seconds=1), "/w.pem expires in 1 hours, at 2030-01-01 00:00:00 UTC"),
        (
            timedelta(),
            "/w.pem expired at 2030-01-01 00:00:00 UTC: open connections continue, and new "
            "connections are refused",
        ),
    ],
    ids=str,
)
def test_notice(left: timedelta, says: str) -> None:
    ends = datetime(2030, 1, 1, tzinfo=UTC)
    found = notice("/w.pem", ends, ends - left)
    assert found.startswith(says)
    assert bool(found) == bool(says)


async def test_https_takes_new_certificates(tmp_path: Path) -> None:
    made = all_roles(tmp_path, ("router",))
    credentials = Credentials.public(made.security)
    assert credentials is not None
    server = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", ssl=ssl_context(credentials)
    )
    port = server.sockets[0].getsockname()[1]
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.pem")

    async def shown() -> bytes:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        connection = writer.get_extra_info("ssl_object")
        writer.close()
        return bytes(connection.getpeercert(binary_form=True))

    first = await shown()
    assert await shown() == first
    cert, _ = made.issue("router")
    second = await shown()
    assert second == ssl.PEM_cert_to_DER_cert(cert.read_text()) != first
    cert.write_text("rubbish")
    assert await shown() == second
    server.close()
    await server.wait_closed()


async def test_https_asks_for_certificates_of_the_clients_ca(tmp_path: Path) -> None:
    made = all_roles(tmp_path)
    section = made.security.model_dump()["tls"]
    pair = {"cert": f"{tmp_path}/router.pem", "key": f"{tmp_path}/router-key.pem"}
    section["public"] = {**pair, "client_ca": f"{tmp_path}/ca.pem"}
    credentials = Credentials.public(type(made.security).model_validate({"tls": section}))
    assert credentials is not None

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", ssl=ssl_context(credentials))
    port = server.sockets[0].getsockname()[1]
    anonymous = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    known = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    known.load_cert_chain(tmp_path / "client.pem", tmp_path / "client-key.pem")
    said = {}
    for name, context in (("known", known), ("anonymous", anonymous)):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        try:
            said[name] = await reader.read()
        except (ssl.SSLError, ConnectionError):
            said[name] = b""
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    assert said == {"known": b"hello", "anonymous": b""}
    server.close()
    await server.wait_closed()


async def test_pushes_after_a_change_take_a_connection_with_the_new_certificate(
    tmp_path: Path,
) -> None:
    """And those before it keep theirs, until the next change."""
    made = all_roles(tmp_path, ("worker",))
    channels = Channels(LAYOUT, Credentials.internal(made.security, "worker"))
    seen = []
    for _ in range(3):
        seen.append(channels.get("127.0.0.1:1"))
        assert channels.get("127.0.0.1:1") is seen[-1]
        made.issue("worker")
    assert len({id(channel) for channel in seen}) == 3
    await asyncio.gather(*channels._retired)
    closed = [channel._channel.closed() for channel in seen]
    assert closed == [True, False, False]
    await channels.close()
    assert all(channel._channel.closed() for channel in seen)
