"""TLS against a real server, with an authority made here."""

from __future__ import annotations

import asyncio
import http.server
import shutil
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.scripted_router import ScriptedRouter, serving

import kvrelay
from kvrelay.client.admin import AdminClient

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl, which makes certificates, is absent"
)
POLICY = kvrelay.RetryPolicy(max_attempts=1)


def make_certificate(folder: Path) -> tuple[bytes, bytes]:
    """(key, certificate) of 127.0.0.1, which vouches for itself."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=kvrelay -keyout {key} -out "
        f"{certificate}"
    )
    extension = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command.split(), *extension], check=True, capture_output=True)
    return key.read_bytes(), certificate.read_bytes()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


def test_both_clients_speak_tls_and_send_the_token(pair: tuple[bytes, bytes]) -> None:
    router = ScriptedRouter()

    async def with_asyncio(target: str) -> kvrelay.Completion:
        async with kvrelay.AsyncClient(target, tls=pair[1], token="s3cret") as client:
            return await client.generate("p", max_tokens=2)

    with serving(router, grpc.ssl_server_credentials([pair])) as target:
        with kvrelay.Client(target, tls=pair[1], token="s3cret") as client:
            assert client.generate("p", max_tokens=2).text == " t100 t101"
        credentials = grpc.ssl_channel_credentials(pair[1])
        with kvrelay.Client(target, tls=credentials, token="s3cret") as client:
            assert client.models()[0].id == "demo"
        assert asyncio.run(with_asyncio(target)).token_ids == (100, 101)
    assert [one["authorization"] for one in router.metadata] == ["Bearer s3cret"] * 2


def test_a_server_that_is_not_trusted_gets_nothing(
    pair: tuple[bytes, bytes], tmp_path: Path
) -> None:
    router = ScriptedRouter()
    stranger = make_certificate(tmp_path)[1]
    with serving(router, grpc.ssl_server_credentials([pair])) as target:
        for tls in (True, stranger, False):
            with (
                kvrelay.Client(target, tls=tls, token="s3cret", retry=POLICY) as client,
                pytest.raises(kvrelay.Unavailable),
            ):
                client.generate("p", timeout=10).result()
    assert router.metadata == []


@pytest.mark.parametrize("token", ["s3cret\n", "  s3cret  ", "s3cret\r\n"])
def test_white_space_around_a_token_is_left_out(token: str) -> None:
    router = ScriptedRouter()
    with serving(router) as target, kvrelay.Client(target, token=token) as client:
        client.generate("p", max_tokens=1).result()
    assert [one["authorization"] for one in router.metadata] == ["Bearer s3cret"]


@pytest.mark.parametrize("token", ["", " \n", "two words", "ünïcode", "a\x00b", "a\nb"])
def test_what_is_no_token_is_refused_and_not_repeated(token: str) -> None:
    for kind in (kvrelay.Client, kvrelay.AsyncClient, AdminClient):
        with pytest.raises(kvrelay.InvalidArgument, match="token is not one word") as caught:
            kind("127.0.0.1:1", token=token)
        assert not token.strip() or token not in caught.value.message


def test_a_path_to_a_certificate_is_trusted(pair: tuple[bytes, bytes], tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes(pair[1])
    with serving(ScriptedRouter(), grpc.ssl_server_credentials([pair])) as target:
        for tls in (str(file), file):
            with kvrelay.Client(target, tls=tls) as client:
                assert client.generate("p", max_tokens=1).text == " t100"


def test_tls_that_is_nothing_of_the_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("hello")
    wrong: list[tuple[Any, str]] = [
        (str(tmp_path / "none.pem"), "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (file, "contains no PEM certificate"),
        (b"hello", "the given bytes contains no PEM certificate"),
        (7, "tls has type int; allowed are"),
        (["ca.pem"], "tls has type list; allowed are"),
    ]
    for tls, words in wrong:
        for kind in (kvrelay.Client, kvrelay.AsyncClient, AdminClient):
            with pytest.raises(kvrelay.InvalidArgument, match=words):
                kind("127.0.0.1:1", tls=tls)


def said(target: str, tls: Any = False) -> str:
    with (
        kvrelay.Client(target, tls=tls, retry=POLICY) as client,
        pytest.raises(kvrelay.KvRelayError) as caught,
    ):
        client.generate("p", timeout=60).result()
    return caught.value.message


def test_a_failed_connection_says_what_to_do(pair: tuple[bytes, bytes], tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        assert "Nothing listens there; start a cluster with `kvrelay serve`" in said(
            f"127.0.0.1:{nobody.getsockname()[1]}"
        )
    with serving(ScriptedRouter(), grpc.ssl_server_credentials([pair])) as target:
        assert "may want TLS: give its CA" in said(target)
        assert "is not signed by the CA that was given" in said(
            target, tls=make_certificate(tmp_path)[1]
        )
    with serving(ScriptedRouter()) as target:
        assert "speaks no TLS: leave out the CA" in said(target, tls=pair[1])
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        where = f"127.0.0.1:{web.server_port}"
        speaks = f"{where}: that port speaks HTTP/1.1, not gRPC; give the address behind"
        assert said(where) == f"{speaks} `grpc=` in the line `kvrelay ready`"
        with AdminClient(where) as admin, pytest.raises(kvrelay.Unavailable) as caught:
            admin.status()
        assert caught.value.message == f"{speaks} `admin=` in the line `kvrelay ready`"
        web.shutdown()
    assert "no host has that name" in said("no-such-host.invalid:1")
    empty = grpc.server(ThreadPoolExecutor(1))
    port = empty.add_insecure_port("127.0.0.1:0")
    empty.start()
    assert "that port has another service; give the address behind `grpc=`" in said(
        f"127.0.0.1:{port}"
    )
    with (
        AdminClient(f"127.0.0.1:{port}") as admin,
        pytest.raises(kvrelay.Unimplemented, match="service; give the address behind `admin=`"),
    ):
        admin.status()
    empty.stop(None).wait()
