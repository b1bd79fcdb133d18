"""TLS against a real server, with an authority made here."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
from scripted_router import ScriptedRouter, serving

import kvrelay

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes certificates, is absent")
POLICY = kvrelay.RetryPolicy(max_attempts=1)


def make_certificate(folder: Path) -> tuple[bytes, bytes]:
    """(key, certificate) of 127.0.0.1, which vouches for itself."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=kvrelay -keyout {key} -out {certificate}"
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


def test_a_server_that_is_not_trusted_gets_nothing(pair: tuple[bytes, bytes], tmp_path: Path) -> None:
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
