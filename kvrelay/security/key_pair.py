"""A certificate, its key and the CA to believe, from PEM files. What is wrong is a ConfigError that
names the file.
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

from kvrelay.errors import ConfigError
from kvrelay.security.tls_roles import WORKER_NAME, Role, dns_names, roles_of

Side = Literal["client", "server"]
_MAX_BYTES = 2**20  # of a file; a bundle of all public CAs has a quarter of that
_USAGE = {"client": ExtendedKeyUsageOID.CLIENT_AUTH, "server": ExtendedKeyUsageOID.SERVER_AUTH}


@dataclass(frozen=True, slots=True)
class Files:
    """Where a key pair comes from, and what it has to be good for."""

    cert: str
    key: str
    ca: str | None  # that its peers' certificates are signed by; none: they show none
    role: Role | None  # none: any, and of any CA
    sides: tuple[Side, ...]
    where: str  # the configuration's name for it, as security.tls.worker
    ca_where: str = "security.tls.ca"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """All in PEM. `chain` begins with the certificate, which is valid until `ends`."""

    chain: bytes
    key: bytes = field(repr=False)
    ca: bytes | None
    ends: datetime


def load(files: Files, now: datetime) -> KeyPair:
    """Raises ConfigError unless a peer that believes the same CA would accept what is in the files
    at that time.
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
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where}: {path} cannot be read: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{where}: {path} is larger than {_MAX_BYTES} bytes")
    return data


def _certificates(pem: bytes, path: str, where: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise ConfigError(
            f"{where}: {path} holds no certificate in PEM (-----BEGIN CERTIFICATE-----)"
        ) from None


def _public_key(pem: bytes, path: str, where: str) -> bytes:
    """Of the private key in the file."""
    try:
        return _encoded(serialization.load_pem_private_key(pem, password=None).public_key())
    except TypeError:
        raise ConfigError(
            f"{where}: the key in {path} has a password; give one without, that only its user can "
            f"read"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(
            f"{where}: {path} holds no private key in PEM (-----BEGIN PRIVATE KEY-----)"
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
                f"{where}: {path} is not valid before {one.not_valid_before_utc}; is "
                f"this clock right?"
            )
        if now >= one.not_valid_after_utc:
            raise ConfigError(
                f"{where}: {path} ended at {one.not_valid_after_utc}; replace it by a new one"
            )


def _check_usage(certificate: x509.Certificate, files: Files) -> None:
    """Its role, the name that it is verified by, and whether it may stand on these sides of a
    connection.
    """
    where, path = f"{files.where}.cert", files.cert
    if files.role is not None:
        roles = roles_of(certificate)
        if roles != (files.role,):
            has = f"the role {' and '.join(roles)}" if roles else "no role"
            raise ConfigError(
                f"{where}: {path} has {has}; it must have {files.role}, by the URI "
                f"kvrelay://role/{files.role} among its alternative names and no other of these"
            )
        if files.role == "worker" and WORKER_NAME not in dns_names(certificate):
            raise ConfigError(
                f"{where}: {path} lacks the DNS name {WORKER_NAME}, by which workers are verified"
            )
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return  # good for everything
    for side in files.sides:
        if _USAGE[side] not in usage:
            raise ConfigError(
                f"{where}: {path} is not for TLS {side}s; its extended key usage "
                f"must have {side}Auth"
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
                f"{where}: {path} holds {one.subject.rfc4514_string()!r}, which is not a CA's "
                f"certificate"
            )
    return authorities


def _is_signed(chain: list[x509.Certificate], authorities: list[x509.Certificate]) -> bool:
    """Each of the chain by the next one, the last by one of the authorities."""
    return all(_signed_by(one, issuer) for one, issuer in pairwise(chain)) and any(
        _signed_by(chain[-1], one) for one in authorities
    )


def _signed_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
