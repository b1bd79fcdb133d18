"""Finds the model of `kvrelay plan`: a folder, a config.json, a hub id, or a name of the table."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

import typer

from kvrelay.errors import FailedPrecondition, InvalidArgument, ModelRefused, NotFound
from kvrelay.planning.model_memory import WEIGHT_DTYPES
from kvrelay.planning.model_source import PlannedModel, described, published
from kvrelay.planning.model_table import find_model, model_names
from kvrelay.planning.quantity import parse_bytes

# Bytes of a config.json.
_MAX_CONFIG = 2**24


def planned_model(name: str, weights: str | None, weight_memory: str | None) -> PlannedModel:
    """Returns the model. weights: its dtype; weight_memory: its bytes, with a unit.

    Raises InvalidArgument or FailedPrecondition for a model that is not there or has no sizes, and
    InvalidArgument for an option.
    """
    if weights is not None and weights not in WEIGHT_DTYPES:
        raise typer.BadParameter(
            f"--weights {weights!r:.40} is unknown; allowed are {', '.join(WEIGHT_DTYPES)}."
        )
    try:
        found = _found(name, weights)
    except ModelRefused as error:
        # The content of a file is at fault, not the usage.
        raise FailedPrecondition(f"{name:.200}: {error.message}") from None
    if weight_memory is not None:
        size = parse_bytes(weight_memory, "--weight-memory")
        told = replace(found.memory, weight_bytes=size, source="--weight-memory")
        found = replace(found, memory=told)
    return found


def _found(name: str, weights: str | None) -> PlannedModel:
    path = Path(name)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError):
        is_folder = is_file = False
    if is_file:
        return described(name, _config(path), weights)
    if not is_folder and (known := find_model(name)):
        return published(known, weights)
    from kvrelay.models import is_on_hub, local_folder, resolve_model
    from kvrelay.models.model_files import check_model_files, has_weights

    try:
        resolved = resolve_model(name)
    except (NotFound, ValueError, OSError) as error:
        if name.startswith((".", "/", "~")):
            raise InvalidArgument(
                f"model {name!r:.200}: there is no such folder and no such config.json"
            ) from error
        near = get_close_matches(name.lower(), model_names(), 3, 0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise InvalidArgument(
            f"model {name!r:.200} is no folder, no config.json, no hub id and no name of the "
            f"built-in table{hint or '; known names are ' + ', '.join(model_names())}"
        ) from error
    try:
        folder = Path(local_folder(resolved))
    except ImportError:
        raise FailedPrecondition(
            f"{name}: a hub id needs the package huggingface-hub; install kvrelay[cluster], or "
            "give a folder"
        ) from None
    config = _config(folder / "config.json")
    is_here = not is_on_hub(resolved) and _names_weights(folder)
    tensors = check_model_files(folder) if is_here or has_weights(folder) else None
    return described(name, config, weights, tensors)


def _names_weights(folder: Path) -> bool:
    """Whether a folder has weights, so that damaged ones are refused."""
    return any(folder.glob("*.safetensors*"))


def _config(file: Path) -> dict[str, object]:
    from kvrelay.models.model_json import read_model_json

    if file.is_file() and file.stat().st_size > _MAX_CONFIG:
        raise ModelRefused(f"{file}: {file.stat().st_size} bytes are too many for a config.json")
    return read_model_json(file)
