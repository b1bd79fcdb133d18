"""Certificates for tests, and clusters' configurations that name them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvrelay.config.security import SecurityConfig
from kvrelay.security.authority import Authority, Issued, write_certificates
from kvrelay.security.tls_roles import Role

DAY = timedelta(days=1)


class Certificates:
    """A folder of certificates, signed by an authority that goes on issuing."""

    def __init__(self, folder: Path, authority: Authority | None = None) -> None:
        self.folder = folder
        self.authority = authority or Authority(30 * DAY)
        self.write("ca", self.authority.issued)

    def issue(
        self,
        role: Role,
        name: str = "",
        lifetime: timedelta = 20 * DAY,
        now: datetime | None = None,
    ) -> tuple[Path, Path]:
        """Writes the files of a new certificate; another of the same name is replaced."""
        return self.write(
            name or role, self.authority.issue(role, (), lifetime, now or datetime.now(UTC))
        )

    def write(self, name: str, issued: Issued) -> tuple[Path, Path]:
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}-key.pem"
        cert.write_bytes(issued.certificate_pem)
        key.write_bytes(issued.key_pem)
        return cert, key

    def by_hand(self, names: Sequence[x509.GeneralName], *usage: x509.ObjectIdentifier) -> Issued:
        """With these names and this extended key usage alone."""
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "by hand")]))
            .issuer_name(self.authority.issued.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        if usage:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        return Issued(builder.sign(self.authority.issued.key, hashes.SHA256()), key)

    @property
    def security(self) -> SecurityConfig:
        return SecurityConfig.model_validate({"tls": tls_section(self.folder)})


def all_roles(
    folder: Path, roles: Sequence[Role] = ("router", "worker", "admin", "client")
) -> Certificates:
    made = Certificates(folder)
    for role in roles:
        made.issue(role)
    return made


def tls_section(folder: Path, **public: Any) -> dict[str, Any]:
    """`security.tls` of the certificates that `kvrelay certs FOLDER` makes."""
    pairs = {
        role: {"cert": f"{folder}/{role}.pem", "key": f"{folder}/{role}-key.pem"}
        for role in ("router", "worker")
    }
    return {"ca": f"{folder}/ca.pem", **pairs, **public}


def made_by_the_command(folder: Path) -> Path:
    write_certificates(folder, (), DAY)
    return folder
