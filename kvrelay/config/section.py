"""The base of all sections of the configuration, and the numbers in them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_SIZE = re.compile(r"^([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)?$")
_UNIT = {
    None: 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}

PositiveInt = Annotated[int, Field(gt=0, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def parse_size(text: str | int) -> int:
    """Returns the bytes of `1GiB`, `512 MB` or a plain number. Raises ValueError with the allowed
    units.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.match(str(text).strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not a size; write a number with one of B, KiB, MiB, GiB, KB, MB, GB"
        )
    return int(float(match[1]) * _UNIT[match[2]])


Memory = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]


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
