"""The role of a certificate's holder. A certificate contains one of four roles."""

from __future__ import annotations

from typing import Literal, get_args

from cryptography import x509

Role = Literal["router", "worker", "admin", "client"]
ROLES: tuple[Role, ...] = get_args(Role)

WORKER_NAME = "kvrelay-worker"
"""A name in each worker's certificate, by which it is verified in place of its address.

Workers come and go under addresses that no certificate can foresee (pods, Ray nodes). So whoever
connects to one checks the CA and this name, whatever IP the registry gave: a router's or client's
certificate does not pass for a worker's.
"""


def uri(role: Role) -> str:
    """Returns the subject alternative name that gives a certificate the role."""
    return f"kvrelay://role/{role}"


def roles_of(certificate: x509.Certificate) -> tuple[Role, ...]:
    """Returns the roles in a certificate; empty for a certificate that was not made for kvrelay."""
    uris = _alternative_names(certificate, x509.UniformResourceIdentifier)
    return tuple(role for role in ROLES if uri(role) in uris)


def dns_names(certificate: x509.Certificate) -> list[str]:
    """Returns the DNS names among the certificate's subject alternative names."""
    return _alternative_names(certificate, x509.DNSName)


def _alternative_names(
    certificate: x509.Certificate, kind: type[x509.DNSName] | type[x509.UniformResourceIdentifier]
) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(kind)
