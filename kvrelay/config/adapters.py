"""The LoRA adapters that are served beside the base model."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from kvrelay.config.section import BadValue, FilePath, Section

# A path in a URL, so that GET /v1/models/NAME finds it.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
MAX_ADAPTERS = 1024
MAX_RANK = 512


def check_model_name(name: str) -> str:
    """Returns the name. Raises ValueError unless it can be the name of a model."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name[:64]!r} is not the name of a model; allowed are 1 to 128 letters, digits and "
            ". _ : / -"
        )
    return name


class AdapterConfig(Section):
    """A LoRA adapter in PEFT's format."""

    # The model name that requests give.
    name: str
    # The adapter's folder, relative to this file.
    path: FilePath

    @field_validator("name")
    @classmethod
    def _is_name(cls, value: str) -> str:
        return check_model_name(value)


class AdaptersConfig(Section):
    """LoRA adapters. Each is a model of its own for clients, and shares the base model's
    weights.
    """

    serve: tuple[AdapterConfig, ...] = ()
    # The largest rank of an adapter.
    max_rank: Annotated[int, Field(ge=1, le=MAX_RANK, strict=True)] = 64
    # Most adapters that a worker holds at a time.
    max_loaded: Annotated[int, Field(ge=1, le=MAX_ADAPTERS, strict=True)] = 64

    @model_validator(mode="after")
    def _fit(self) -> AdaptersConfig:
        seen: set[str] = set()
        for place, one in enumerate(self.serve):
            if one.name in seen:
                raise BadValue(
                    f"{one.name!r} is the name of two adapters; give each its own",
                    ("serve", place, "name"),
                )
            seen.add(one.name)
        if len(self.serve) > self.max_loaded:
            raise BadValue(
                f"{len(self.serve)} adapters are more than max_loaded {self.max_loaded}; raise "
                "max_loaded, or serve fewer",
                ("serve",),
            )
        return self
