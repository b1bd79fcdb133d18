"""The file of tenants and the hashes of their tokens.

A token is random (`new_token`), so its SHA-256 neither reveals the token nor allows a search for
it: the file contains no secrets. The file still decides who has access, so only the operators of
the cluster should be able to write it.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, model_validator

from kvrelay.config.config_file import validated
from kvrelay.config.section import BadValue, PositiveInt, Section
from kvrelay.config.yaml_file import YamlFile
from kvrelay.tenants import ANY_ROLE, Role, Tenant

# Scanners for leaked secrets recognise a token by this prefix.
PREFIX = "kvr_"
TOKEN_BYTES = 32
# Bounded, because each tenant may have metric series of its own.
MAX_TENANTS = 1000
# Per tenant. Two are needed to rotate a token without a gap.
MAX_TOKENS = 16
T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def new_token() -> str:
    """Returns a new random token."""
    return PREFIX + secrets.token_urlsafe(TOKEN_BYTES)


def digest_of(token: str) -> str:
    """Returns the SHA-256 of a token in the form that the file uses."""
    return hashlib.sha256(token.encode()).hexdigest()


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            "must be 1 to 63 letters, digits, '.', '_' or '-'; the first must be a letter or digit"
        )
    return value


def _digest(value: str) -> str:
    # The message does not repeat the value, because the value may be the token itself.
    if not _DIGEST.fullmatch(value):
        raise ValueError(
            "must be the SHA-256 of a token as 64 hexadecimal digits, as printed by `kvrelay "
            "token new`"
        )
    return value


def _some(most: int) -> Callable[[tuple[T, ...]], tuple[T, ...]]:
    def check(values: tuple[T, ...]) -> tuple[T, ...]:
        if not 1 <= len(values) <= most:
            raise ValueError(f"has {len(values)} entries; allowed are 1 to {most}")
        return values

    return check


class TenantEntry(Section):
    """One tenant in the file: its token hashes, roles, weight and limits."""

    name: Annotated[str, AfterValidator(_name)]
    tokens_sha256: Annotated[
        tuple[Annotated[str, AfterValidator(_digest)], ...], AfterValidator(_some(MAX_TOKENS))
    ]
    roles: Annotated[tuple[Role, ...], AfterValidator(_some(len(ANY_ROLE)))] = ("client",)
    weight: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 1.0
    max_running: PositiveInt | None = None
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    max_reasoning_tokens: PositiveInt | None = None
    # By default, a tenant cannot raise its priority.
    min_priority: Annotated[int, Field(ge=-(2**31), lt=2**31, strict=True)] = 0

    def tenant(self) -> Tenant:
        """Returns the tenant without its token hashes, and with its cache salt."""
        values = self.model_dump(exclude={"tokens_sha256", "roles"})
        return Tenant(
            **values, roles=frozenset(self.roles), salt=_salt(self.name, self.tokens_sha256[0])
        )


class TokensFile(Section):
    """The whole tokens file. Names and token hashes must be unique."""

    tenants: Annotated[tuple[TenantEntry, ...], AfterValidator(_some(MAX_TENANTS))]

    @model_validator(mode="after")
    def _distinct(self) -> TokensFile:
        names: dict[str, int] = {}
        digests: dict[str, str] = {}
        for index, entry in enumerate(self.tenants):
            if entry.name in names:
                raise BadValue(
                    f"{entry.name} is the name of an earlier tenant; names must be unique",
                    ("tenants", index, "name"),
                )
            names[entry.name] = index
            for number, digest in enumerate(entry.tokens_sha256):
                if digest in digests:
                    where = ("tenants", index, "tokens_sha256", number)
                    raise BadValue(
                        f"this token belongs to {digests[digest]}; each token must belong to "
                        "one tenant",
                        where,
                    )
                digests[digest] = entry.name
        return self


def load_tokens(path: Path) -> Mapping[bytes, Tenant]:
    """Returns each tenant by the SHA-256 of each of its tokens. Raises ConfigError, whose message
    contains no value of the file.
    """
    file = validated(TokensFile, YamlFile.read(path), {}, show_values=False)
    return {
        bytes.fromhex(digest): entry.tenant()
        for entry in file.tenants
        for digest in entry.tokens_sha256
    }


def _salt(name: str, first_digest: str) -> str:
    """Returns the cache salt of a tenant. The salt is equal on all routers with the same file, also
    after a restart, and other tenants cannot guess it.

    KV blocks are identified by hashes that are fast rather than cryptographic. A tenant that knew
    the salt of another tenant could search for a prompt whose block hashes collide with those of
    the other tenant. When the tenant's first token changes, its cached prefixes stay unused until
    they are evicted.
    """
    return hashlib.sha256(f"kvrelay prefix cache\0{name}\0{first_digest}".encode()).hexdigest()
