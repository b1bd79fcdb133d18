"""The built-in table of published models. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A published model: its sizes, in the keys of config.json, and where they come from."""

    name: str
    hub_id: str
    config: dict[str, Any]
    # Published figures.
    parameters: float
    active_parameters: float
    # Dtype of the published weights.
    weights: str
    source: str
    # Bytes of the published checkpoint, where its tensors have several dtypes; 0 otherwise.
    weight_bytes: float = 0.0


def model_names() -> tuple[str, ...]:
    """Returns the names of the table."""
    return tuple(_table())


def find_model(name: str) -> PublishedModel | None:
    """Returns the model with this name or hub id, in any case; None if the table has none."""
    wanted = name.lower()
    return _table().get(wanted) or _by_hub_id().get(wanted)


@cache
def _table() -> dict[str, PublishedModel]:
    text = files("kvrelay.planning").joinpath("tables/models.json").read_text(encoding="utf-8")
    return {one["name"]: _model(one) for one in json.loads(text)}


@cache
def _by_hub_id() -> dict[str, PublishedModel]:
    return {one.hub_id.lower(): one for one in _table().values()}


def _model(entry: dict[str, Any]) -> PublishedModel:
    return PublishedModel(
        name=entry["name"],
        hub_id=entry["hub_id"],
        config=entry["config"],
        parameters=entry["parameters_b"] * 1e9,
        active_parameters=entry["active_b"] * 1e9,
        weights=entry["weights"],
        source=entry["source"],
        weight_bytes=entry.get("weight_gb", 0.0) * 1e9,
    )
