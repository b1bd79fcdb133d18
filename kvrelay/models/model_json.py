"""Reads a JSON file of a model folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvrelay.errors import ModelRefused

# Names that families of multimodal models give to the language model's keys.
_TEXT = ("text_config", "llm_config", "language_config")


def read_config_json(folder: Path) -> dict[str, Any]:
    """Returns config.json of the model folder, empty if there is none. Raises ModelRefused like
    `read_model_json`.
    """
    file = folder / "config.json"
    return read_model_json(file) if file.is_file() else {}


def read_model_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in the file. Raises ModelRefused if the file cannot be read or is not
    a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelRefused(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise ModelRefused(f"{path}:{line}: not valid JSON; download the model again") from error
    if not isinstance(value, dict):
        raise ModelRefused(f"{path}: the content is not a JSON object")
    return value


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of the language model. config: the content of config.json, which for
    multimodal models has them in a mapping of their own. Some files keep a part of them outside.
    """
    for name in _TEXT:
        if isinstance(inner := config.get(name), dict):
            return {**config, **inner}
    return config
