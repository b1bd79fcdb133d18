"""Files that a process cannot serve with are refused when it starts, by name and reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from support.certificates import DAY, Certificates, all_roles

from kvrelay.config.security import SecurityConfig
from kvrelay.errors import ConfigError
from kvrelay.security.authority import Authority
from kvrelay.security.credentials import Credentials
from kvrelay.security.tls_roles import uri

NOW = datetime.now(UTC)


def _stranger(made: Certificates) -> None:
    made.write("worker", Authority(DAY).issue("worker", (), DAY))


def _locked_key(made: Certificates) -> None:
    locked = made.authority.issue("worker", (), DAY)
    made.write("worker", locked)
    (made.folder / "worker-key.pem").write_bytes(
        locked.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )


def _another_key(made: Certificates) -> None:
    (made.folder / "worker-key.pem").write_bytes((made.folder / "router-key.pem").read_bytes())


def _role(
    *names: x509.GeneralName, usage: tuple[x509.ObjectIdentifier, ...] = ()
) -> Callable[[Certificates], None]:
    def write(made: Certificates) -> None:
        made.write("worker", made.by_hand(names, *usage))

    return write


WORKER, NAME = x509.UniformResourceIdentifier(uri("worker")), x509.DNSName("kvrelay-worker")
BROKEN: dict[str, tuple[Callable[[Certificates], object], str]] = {
    "no certificate": (
        lambda made: (made.folder / "worker.pem").unlink(),
        "security.tls.worker.cert: {}/worker.pem cannot be read: No such file or directory",
    ),
    "a pipe": (
        lambda made: (
            (made.folder / "worker.pem").unlink(),
            os.mkfifo(made.folder / "worker.pem"),
        ),
        "security.tls.worker.cert: {}/worker.pem is not a regular file",
    ),
    "no key": (
        lambda made: (made.folder / "worker-key.pem").unlink(),
        "security.tls.worker.key: {}/worker-key.pem cannot be read: No such file or directory",
    ),
    "no CA": (
        lambda made: (made.folder / "ca.pem").unlink(),
        "security.tls.ca: {}/ca.pem cannot be read: No such file or directory",
    ),
    "folder": (
        lambda made: ((made.folder / "ca.pem").unlink(), (made.folder / "ca.pem").mkdir()),
        "security.tls.ca: {}/ca.pem cannot be read: Is a directory",
    ),
    "rubbish": (
        lambda made: (made.folder / "worker.pem").write_text("rubbish"),
        "security.tls.worker.cert: {}/worker.pem contains no PEM certificate",
    ),
    "rubbish for a key": (
        lambda made: (made.folder / "worker-key.pem").write_text("rubbish"),
        "security.tls.worker.key: {}/worker-key.pem contains no PEM private key",
    ),
    "huge": (
        lambda made: (made.folder / "ca.pem").write_bytes(b"x" * 2**21),
        "security.tls.ca: {}/ca.pem is larger than the allowed 1048576 bytes",
    ),
    "key with a password": (
        _locked_key,
        "security.tls.worker.key: the key in {}/worker-key.pem has a password",
    ),
    "another's key": (
        _another_key,
        "security.tls.worker.key: {}/worker-key.pem is not the key of the certificate in "
        "{}/worker.pem",
    ),
    "ended": (
        lambda made: made.issue("worker", lifetime=timedelta(minutes=-1)),
        "security.tls.worker.cert: {}/worker.pem expired at",
    ),
    "not yet valid": (
        lambda made: made.issue("worker", now=NOW + DAY),
        "security.tls.worker.cert: {}/worker.pem is not valid before",
    ),
    "a router's": (
        lambda made: made.issue("router", "worker"),
        "security.tls.worker.cert: {}/worker.pem has the role router; it must have the role worker",
    ),
    "no role": (
        _role(NAME),
        "security.tls.worker.cert: {}/worker.pem has no role; it must have the role worker",
    ),
    "two roles": (
        _role(WORKER, NAME, x509.UniformResourceIdentifier(uri("admin"))),
        "security.tls.worker.cert: {}/worker.pem has the role worker and admin; it must have "
        "the role worker",
    ),
    "no name": (
        _role(WORKER),
        "security.tls.worker.cert: {}/worker.pem does not have the DNS name kvrelay-worker",
    ),
    "for clients only": (
        _role(WORKER, NAME, usage=(ExtendedKeyUsageOID.CLIENT_AUTH,)),
        "security.tls.worker.cert: {}/worker.pem cannot be used by TLS servers",
    ),
    "of another CA": (
        _stranger,
        "security.tls.worker.cert: {}/worker.pem is not signed by the CA in {}/ca.pem",
    ),
    "no CA's certificate": (
        lambda made: made.issue("client", "ca"),
        "security.tls.ca: {}/ca.pem contains 'CN=kvrelay client', which is not a CA certificate",
    ),
}


@pytest.mark.parametrize(("spoil", "says"), BROKEN.values(), ids=BROKEN.keys())
def test_a_bad_file_is_named(
    tmp_path: Path, spoil: Callable[[Certificates], object], says: str
) -> None:
    made = all_roles(tmp_path, ("router", "worker"))
    assert Credentials.internal(made.security, "worker") is not None
    spoil(made)
    with pytest.raises(ConfigError) as caught:
        Credentials.internal(made.security, "worker")
    assert caught.value.message.startswith(says.replace("{}", str(tmp_path))), caught.value.message


def test_certificates_from_other_tools_are_taken(tmp_path: Path) -> None:
    """Good for everything, as no extended key usage says otherwise."""
    made = all_roles(tmp_path, ("router",))
    made.write("worker", made.by_hand([WORKER, NAME]))
    assert Credentials.internal(made.security, "worker") is not None


def test_a_process_needs_its_own_files_only(tmp_path: Path) -> None:
    made = all_roles(tmp_path, ("router",))
    assert Credentials.internal(made.security, "router") is not None
    assert Credentials.public(made.security) is not None
    with pytest.raises(ConfigError, match=r"worker\.pem cannot be read"):
        Credentials.internal(made.security, "worker")


def test_without_tls_there_are_none() -> None:
    assert (
        Credentials.internal(SecurityConfig(), "worker")
        is Credentials.public(SecurityConfig())
        is None
    )
