"""Loads a certificate, its key and the trusted CA from PEM files. Every problem is a ConfigError
that names the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID

from kvrelay.config.special_file import is_special
from kvrelay.errors import ConfigError
from kvrelay.security.tls_roles import WORKER_NAME, Role, dns_names, roles_of

Side = Literal["client", "server"]
# Per file. A bundle of all public CAs has a quarter of that.
_MAX_BYTES = 2**20
_USAGE = {"client": ExtendedKeyUsageOID.CLIENT_AUTH, "server": ExtendedKeyUsageOID.SERVER_AUTH}


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a key pair, and the uses that its certificate must allow."""

    cert: str
    key: str
    # The CA of the peers' certificates; None: peers present no certificate.
    ca: str | None
    # None: any role, and a certificate of any CA.
    role: Role | None
    sides: tuple[Side, ...]
    # The name in the configuration, for example security.tls.worker.
    where: str
    ca_where: str = "security.tls.ca"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """PEM data. `chain` begins with the certificate of the process. The chain is valid until
    `ends`.
    """

    chain: bytes
    key: bytes = field(repr=False)
    ca: bytes | None
    ends: datetime


def load(files: Files, now: datetime) -> KeyPair:
    """Loads the files. Raises ConfigError unless a peer with the same CA would accept the
    certificate at the time `now`.
    """
    chain_pem = _read(files.cert, f"{files.where}.cert")
    key_pem = _read(files.key, f"{files.where}.key")
    chain = _certificates(chain_pem, files.cert, f"{files.where}.cert")
    _check_time(chain, files.cert, f"{files.where}.cert", now)
    if _public_key(key_pem, files.key, f"{files.where}.key") != _encoded(chain[0].public_key()):
        raise ConfigError(
            f"{files.where}.key: {files.key} is not the key of the certificate in {files.cert}"
        )
    _check_usage(chain[0], files)
    ca_pem = None
    if files.ca is not None:
        ca_pem = _read(files.ca, files.ca_where)
        authorities = _authorities(ca_pem, files.ca, files.ca_where, now)
        if files.role is not None and not _is_signed(chain, authorities):
            raise ConfigError(
                f"{files.where}.cert: {files.cert} is not signed by the CA in {files.ca}"
            )
    return KeyPair(chain_pem, key_pem, ca_pem, min(one.not_valid_after_utc for one in chain))


def _read(path: str, where: str) -> bytes:
    try:
        if is_special(path):
            raise ConfigError(f"{where}: {path} is not a regular file")
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where}: {path} cannot be read: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{where}: {path} is larger than the allowed {_MAX_BYTES} bytes")
    return data


def _certificates(pem: bytes, path: str, where: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise ConfigError(
            f"{where}: {path} contains no PEM certificate (-----BEGIN CERTIFICATE-----)"
        ) from None


def _public_key(pem: bytes, path: str, where: str) -> bytes:
    """Returns the encoded public key of the private key in the file."""
    try:
        return _encoded(serialization.load_pem_private_key(pem, password=None).public_key())
    except TypeError:
        raise ConfigError(
            f"{where}: the key in {path} has a password; remove it, and make the file readable "
            "for its user only"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(
            f"{where}: {path} contains no PEM private key (-----BEGIN PRIVATE KEY-----)"
        ) from None


def _encoded(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _check_time(
    certificates: Sequence[x509.Certificate], path: str, where: str, now: datetime
) -> None:
    for one in certificates:
        if now < one.not_valid_before_utc:
            raise ConfigError(
                f"{where}: {path} is not valid before {one.not_valid_before_utc}; check the "
                "clock of this machine"
            )
        if now >= one.not_valid_after_utc:
            raise ConfigError(
                f"{where}: {path} expired at {one.not_valid_after_utc}; replace it with a new "
                "certificate"
            )


def _check_usage(certificate: x509.Certificate, files: Files) -> None:
    """Checks the role, the DNS name of workers, and whether the certificate allows the given sides
    of a connection.
    """
    where, path = f"{files.where}.cert", files.cert
    if files.role is not None:
        roles = roles_of(certificate)
        if roles != (files.role,):
            has = f"the role {' and '.join(roles)}" if roles else "no role"
            raise ConfigError(
                f"{where}: {path} has {has}; it must have the role {files.role} only, as the "
                f"subject alternative name kvrelay://role/{files.role}"
            )
        if files.role == "worker" and WORKER_NAME not in dns_names(certificate):
            raise ConfigError(
                f"{where}: {path} does not have the DNS name {WORKER_NAME}, which is required "
                "for workers"
            )
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        # Without the extension, all uses are allowed.
        return
    for side in files.sides:
        if _USAGE[side] not in usage:
            raise ConfigError(
                f"{where}: {path} cannot be used by TLS {side}s; its extended key usage must "
                f"contain {side}Auth"
            )


def _authorities(pem: bytes, path: str, where: str, now: datetime) -> list[x509.Certificate]:
    authorities = _certificates(pem, path, where)
    _check_time(authorities, path, where, now)
    for one in authorities:
        try:
            is_ca = one.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        except x509.ExtensionNotFound:
            is_ca = False
        if not is_ca:
            raise ConfigError(
                f"{where}: {path} contains {one.subject.rfc4514_string()!r}, which is not a CA "
                "certificate"
            )
    return authorities


def _is_signed(chain: list[x509.Certificate], authorities: list[x509.Certificate]) -> bool:
    """Whether each certificate of the chain is signed by the next one, and the last by one of the
    authorities.
    """
    return all(_signed_by(one, issuer) for one, issuer in pairwise(chain)) and any(
        _signed_by(chain[-1], one) for one in authorities
    )


def _signed_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
