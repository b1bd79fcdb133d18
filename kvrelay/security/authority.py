"""A private CA and certificates for each role, for trying out TLS."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvrelay.errors import ConfigError, InvalidArgument
from kvrelay.security.tls_roles import ROLES, WORKER_NAME, Role, uri

_LOCAL = ("localhost", "127.0.0.1", "::1")
# The clocks of other machines may be behind.
_BACKDATED = timedelta(hours=1)
# Labels of RFC 1123, and underscores, which some clusters use. The first may be a wildcard.
_LABEL = "[A-Za-z0-9_-]{1,63}"
_DNS_NAME = re.compile(rf"(?=.{{1,253}}$)(\*\.)?{_LABEL}(\.{_LABEL})*")
_SERVERS: tuple[Role, ...] = ("router", "worker")


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        """The certificate in PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """The private key in PEM (PKCS #8), without a password."""
        return self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )


class Authority:
    """Signs certificates. The authority's own certificate is `issued`."""

    def __init__(self, lifetime: timedelta, now: datetime | None = None) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvrelay CA")])
        builder = _builder(name, name, key, now or datetime.now(UTC), lifetime).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        builder = builder.add_extension(_key_usage(signs=True), critical=True)
        self.issued = Issued(builder.sign(key, hashes.SHA256()), key)

    def issue(
        self, role: Role, hosts: Sequence[str], lifetime: timedelta, now: datetime | None = None
    ) -> Issued:
        """Issues a certificate for a role. Server certificates are valid for this machine and for
        `hosts`, which are DNS names or IP addresses.

        Raises InvalidArgument for a host that is neither.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        authority = self.issued.certificate
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"kvrelay {role}")])
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri(role))]
        usage = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role in _SERVERS:
            usage.append(ExtendedKeyUsageOID.SERVER_AUTH)
            names += [_host(host) for host in dict.fromkeys((*_LOCAL, *hosts))]
        if role == "worker":
            names.append(x509.DNSName(WORKER_NAME))
        builder = (
            _builder(subject, authority.subject, key, now or datetime.now(UTC), lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.issued.key.public_key()),
                critical=False,
            )
        )
        return Issued(builder.sign(self.issued.key, hashes.SHA256()), key)


def write_certificates(folder: Path, hosts: Sequence[str], lifetime: timedelta) -> None:
    """Writes ca.pem, ROLE.pem and the matching -key.pem files, readable only by the user.

    Raises ConfigError, before anything is written, if one of the files exists. Raises ConfigError
    if the folder cannot be written to, and InvalidArgument for an invalid host.
    """
    authority = Authority(lifetime)
    made = {"ca": authority.issued}
    for role in ROLES:
        made[role] = authority.issue(role, hosts, lifetime)
    files: dict[Path, bytes] = {}
    for name, issued in made.items():
        files[folder / f"{name}.pem"] = issued.certificate_pem
        files[folder / f"{name}-key.pem"] = issued.key_pem
    if there := [str(path) for path in files if path.exists()]:
        more = len(there) - 1
        found = f"{there[0]} and {more} more files exist" if more else f"{there[0]} exists"
        raise ConfigError(f"{found}, and certificates are not overwritten; choose another folder")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, data in files.items():
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written to: {error.strerror}; choose a folder with write access"
        ) from None


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    lifetime: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    """Returns the key usage of a CA, or of an end of a connection."""
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not _DNS_NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name!r:.100} is neither an IP address nor a DNS name in ASCII", field="host"
        )
    return x509.DNSName(name)
