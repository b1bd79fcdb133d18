"""Finds and checks a model's files before any of them is loaded."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from kvrelay.engine.model.digest import model_digest
from kvrelay.errors import ModelRefused, NotFound
from kvrelay.models.hub import cache_of, model_folder
from kvrelay.models.model_identity import SETTINGS
from kvrelay.models.model_json import read_model_json

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
SAMPLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of a model and its parsed configuration."""

    folder: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that affect the model's output."""
        settings = (self.folder / name for name in SETTINGS)
        return (*self.weights, *(path for path in settings if path.is_file()))

    @property
    def model_id(self) -> str:
        """A hash over every byte of the files. Raises ModelRefused."""
        return model_digest(self.files)

    @property
    def sampled_model_id(self) -> str:
        """The model id of protocol 0 workers. Different models may have the same id.

        128 bits over the configuration and, for each file of weights, the header (tensor names,
        shapes, offsets) and the first bytes of each tensor.
        """
        digest = hashlib.blake2b(json.dumps(self.config, sort_keys=True).encode(), digest_size=16)
        for path in self.weights:
            with path.open("rb") as file:
                length = file.read(8)
                header = file.read(int.from_bytes(length, "little"))
                digest.update(length + header)
                data = file.tell()
                tensors = [
                    entry for name, entry in json.loads(header).items() if name != "__metadata__"
                ]
                for start, end in sorted(tensor["data_offsets"] for tensor in tensors):
                    file.seek(data + start)
                    digest.update(file.read(min(SAMPLE_BYTES, end - start)))
        return digest.hexdigest()


def find_checkpoint(path: str) -> Checkpoint:
    """Finds the files in a folder or under a hub id. Raises ModelRefused if files are missing or
    not safe to load.
    """
    try:
        folder = Path(path) if os.path.isdir(path) else model_folder(path)
    except NotFound as error:
        raise ModelRefused(error.message) from error
    root = cache_of(folder) or folder
    config = read_model_json(folder / CONFIG)
    if "auto_map" in config:
        raise ModelRefused(
            f"{folder / CONFIG}: auto_map requires code from the model folder, which is never "
            "run; use a model without auto_map"
        )
    if "transformers_weights" in config:
        raise ModelRefused(
            f"{folder / CONFIG}: transformers_weights names other weight files; the weights "
            f"must be in {WEIGHTS}"
        )
    if config.get("is_encoder_decoder"):
        raise ModelRefused(
            f"{folder / CONFIG}: encoder-decoder models are not supported; use a decoder-only model"
        )
    if (folder / "adapter_config.json").exists():
        raise ModelRefused(
            f"{folder}: adapters are not supported; merge the adapter into its base model"
        )
    names = [WEIGHTS] if (folder / WEIGHTS).exists() else _shards(folder)
    for file in (*(folder / name for name in names), *folder.iterdir()):
        if not file.resolve().is_relative_to(root.resolve()):
            raise ModelRefused(
                f"{file}: the link points outside of the model folder; copy the file into the "
                "folder"
            )
    for name in names:
        try:
            with safe_open(folder / name, framework="pt"):
                # Opening checks the header against the file.
                pass
        except (SafetensorError, OSError) as error:
            raise ModelRefused(
                f"{folder / name}: invalid safetensors file: {error!s:.300}; copy it again"
            ) from error
    return Checkpoint(folder, config, tuple(folder / name for name in names))


def _shards(folder: Path) -> list[str]:
    """The files of weights that the index names, each in `folder`."""
    if not (folder / INDEX).exists():
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
        found = (
            f"only {', '.join(pickles)}, and pickled weights can run code"
            if pickles
            else "no weights"
        )
        raise ModelRefused(
            f"{folder}: {WEIGHTS} and {INDEX} are missing; found {found}; convert the weights "
            "to safetensors"
        )
    weight_map = read_model_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise ModelRefused(
            f"{folder / INDEX}: weight_map, from tensor names to file names, is missing"
        )
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or Path(name).suffix != ".safetensors":
            raise ModelRefused(
                f"{folder / INDEX}: {name!r:.100} is not the name of a safetensors file in "
                "this folder"
            )
    missing = [name for name in names if not os.path.exists(folder / name)]
    if missing:
        some = ", ".join(missing[:3])
        raise ModelRefused(
            f"{folder}: {len(missing)} of {len(names)} weight files are missing: {some:.300}; "
            "copy them into the folder"
        )
    return names
