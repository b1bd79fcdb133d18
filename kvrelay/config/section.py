"""The base of all sections of the configuration, and the numbers in them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializationInfo,
)

from kvrelay.config.size import exact_size, parse_size

PositiveInt = Annotated[int, Field(gt=0, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
# Context of a dump for people, in which sizes have units.
WITH_UNITS = "with units"


def _for_reader(value: str | int | None, info: SerializationInfo) -> str | int | None:
    return exact_size(value) if isinstance(value, int) and info.context == WITH_UNITS else value


_Shown = PlainSerializer(_for_reader)
Memory = Annotated[int, BeforeValidator(parse_size), Field(gt=0), _Shown]


def _auto_or_size(value: str | int) -> str | int:
    if value == "auto":
        return value
    try:
        size = parse_size(value)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None
    if size <= 0:
        raise ValueError(f"must be above 0, not {value!r}; write a size such as 1GiB, or auto")
    return size


# auto: each worker chooses by its device and host.
KvMemory = Annotated[int | Literal["auto"], BeforeValidator(_auto_or_size), _Shown]
# A file of the user's. The empty path would stand for the folder of the configuration.
FilePath = Annotated[str, Field(min_length=1)]
# Number of workers of one pool.
MAX_POOL = 1024


class BadValue(ValueError):
    """A bad value inside the mapping that a validator checks. `at` is the path from the mapping to
    the value.
    """

    def __init__(self, message: str, at: tuple[str | int, ...]) -> None:
        super().__init__(message)
        self.at = at


class Section(BaseModel):
    """A mapping in the file. Unknown keys are errors. Values cannot change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)
