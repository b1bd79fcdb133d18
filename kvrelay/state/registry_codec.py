"""Values in Redis: JSON objects {"schema": 1, "value": {...}}, believed only after every field was
checked.
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
MAX_TEXT = 512  # characters
MAX_ITEMS = 64  # of a list of texts

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_PRIVATE = tuple(
    ipaddress.ip_network(network)
    for network in (
        "127.0.0.0/8",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",  # carriers', which clouds give to pods
        "::1/128",
        "fc00::/7",
    )
)
# Made printable; other text is refused if it is not
_FREE_TEXT = {"reason", "integrity_error", "certificate_note"}
# and *_bytes, *_tokens; the rest are int32 on the wire
_INT64 = {"epoch", "preemptions", "finished", "failed"}
_SIZES = {
    "block_size",
    "block_bytes",
    "max_model_len",
    "tensor_parallel",
}  # of what there is some of; others are counts

T = TypeVar("T", bound="DataclassInstance")


class _Envelope(BaseModel, Generic[T]):
    """Fields that this version does not know are ignored, so that a newer worker can join during a
    rolling restart.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")
    schema_number: Literal[1] = Field(alias="schema")
    value: T


@functools.cache
def _envelope(kind: type[T]) -> type[_Envelope[T]]:
    return _Envelope[kind]  # type: ignore[valid-type]


def encode(value: DataclassInstance) -> str:
    """Raises ValueError like `decode`, so that nobody publishes what nobody would read."""
    return json.dumps(
        {"schema": SCHEMA, "value": dataclasses.asdict(_checked(value))}, allow_nan=False
    )


def decode(kind: type[T], raw: bytes) -> T:
    """Raises ValueError saying what is wrong with the value."""
    if len(raw) > MAX_VALUE_BYTES:
        raise ValueError(f"longer than {MAX_VALUE_BYTES} bytes")
    try:
        value: T = _envelope(kind).model_validate_json(raw).value
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None
    return _checked(value)


def check_name(text: str) -> str:
    """A worker, router or owner name: letters, digits and . _ : - only."""
    if not _NAME.fullmatch(text):
        raise ValueError(f"{text[:64]!r} is not a name of 1 to 128 letters, digits and . _ : -")
    return text


def check_address(text: str) -> str:
    """HOST:PORT with `localhost` or the literal address of a private network: workers are never on
    the internet.

    Link-local addresses are not among them: at one of these, clouds give away a machine's
    credentials.
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
        raise ValueError(f"{name} {number:g} is out of range")
