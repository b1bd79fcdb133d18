"""Encodes and decodes values in Redis: JSON objects {"schema": 1, "value": {...}}. Every field is
checked before a value is used.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import json
import re
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA = 1
MAX_VALUE_BYTES = 64 * 1024
# Characters.
MAX_TEXT = 512
# Most items of a list of strings. 1024 ids of adapters fit into MAX_VALUE_BYTES.
MAX_ITEMS = 1024

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_PRIVATE = tuple(
    ipaddress.ip_network(network)
    for network in (
        "127.0.0.0/8",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        # Carrier-grade NAT addresses, which clouds assign to pods.
        "100.64.0.0/10",
        "::1/128",
        "fc00::/7",
    )
)
# In these fields, unprintable characters are replaced. In other fields they are an error.
_FREE_TEXT = {"reason", "integrity_error", "certificate_note", "error", "refused_adapters"}
# Also *_bytes and *_tokens. Other integers are int32 on the wire.
_INT64 = {
    "epoch",
    "preemptions",
    "begun",
    "finished",
    "failed",
    "hits",
    "misses",
    "stored",
    "evicted",
    "dropped",
    "errors",
}
# Sizes must be at least 1. Other numbers are counts, which may be 0.
_SIZES = {
    "block_size",
    "block_bytes",
    "max_model_len",
    "tensor_parallel",
}

T = TypeVar("T", bound="DataclassInstance")


class _Envelope(BaseModel, Generic[T]):
    """Ignores unknown fields, so that a newer worker can join during a rolling restart."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")
    schema_number: Literal[1] = Field(alias="schema")
    value: T


@functools.cache
def _envelope(kind: type[T]) -> type[_Envelope[T]]:
    return _Envelope[kind]  # type: ignore[valid-type]


def encode(value: DataclassInstance) -> str:
    """Encodes a value. Raises ValueError like `decode`, so that invalid values are never
    published.
    """
    return json.dumps(
        {"schema": SCHEMA, "value": dataclasses.asdict(_checked(value))}, allow_nan=False
    )


def decode(kind: type[T], raw: bytes) -> T:
    """Decodes a value. Raises ValueError with the reason."""
    if len(raw) > MAX_VALUE_BYTES:
        raise ValueError(f"the value is longer than {MAX_VALUE_BYTES} bytes")
    try:
        value: T = _envelope(kind).model_validate_json(raw).value
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None
    return _checked(value)


def check_name(text: str) -> str:
    """Checks the name of a worker, router or owner: 1 to 128 letters, digits and . _ : - only.
    Raises ValueError.
    """
    if not _NAME.fullmatch(text):
        raise ValueError(
            f"{text[:64]!r} is not a valid name; allowed are 1 to 128 letters, digits and . _ : -"
        )
    return text


def check_address(text: str) -> str:
    """Checks that an address is HOST:PORT with `localhost` or a literal address of a private
    network, because workers are never on the internet. Raises ValueError.

    Link-local addresses are not allowed, because clouds serve a machine's credentials at one of
    them.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError(f"address {text[:64]!r} is not HOST:PORT")
    if host == "localhost":
        return text
    try:
        ip = ipaddress.ip_address(
            host[1:-1] if host.startswith("[") and host.endswith("]") else host
        )
    except ValueError:
        raise ValueError(
            f"address {text[:64]!r} has a host that is neither an IP address nor localhost"
        ) from None
    if not any(ip in network for network in _PRIVATE if network.version == ip.version):
        raise ValueError(f"address {text[:64]!r} is outside the private networks")
    return text


def _checked(value: T) -> T:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        name, item = field.name, getattr(value, field.name)
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            changes[name] = _checked(item)
        elif isinstance(item, str):
            changes[name] = _text(name, item)
        elif isinstance(item, tuple) and all(isinstance(one, str) for one in item):
            if len(item) > MAX_ITEMS:
                raise ValueError(f"{name} has {len(item)} items; allowed are {MAX_ITEMS}")
            changes[name] = tuple(_text(name, one) for one in item)
        elif isinstance(item, tuple):
            if len(item) > MAX_ITEMS:
                raise ValueError(f"{name} has {len(item)} items; allowed are {MAX_ITEMS}")
            changes[name] = tuple(_checked(one) for one in item)
        elif isinstance(item, int | float) and not isinstance(item, bool):
            _check_number(name, item)
    return dataclasses.replace(value, **changes)


def _text(name: str, text: str) -> str:
    if name in _FREE_TEXT:
        return "".join(char if char.isprintable() else " " for char in text[:MAX_TEXT])
    if len(text) > MAX_TEXT or not text.isprintable():
        raise ValueError(f"{name} {text[:64]!r} is too long or has control characters")
    if name in ("worker_id", "router_id", "controller_id"):
        return check_name(text)
    return check_address(text) if name == "address" else text


def _check_number(name: str, number: float) -> None:
    bits = 63 if name in _INT64 or name.endswith(("_bytes", "_tokens")) else 31
    if number < (name in _SIZES) or (isinstance(number, int) and number >= 1 << bits):
        raise ValueError(f"{name} {number!s:.40} is out of range")
