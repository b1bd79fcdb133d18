"""Checks the files of a model folder without a model library, for processes that only start
others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import ModelRefused
from kvrelay.models.model_json import read_model_json

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
# Bytes; the limit of the safetensors format.
_MAX_HEADER = 100 * 2**20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the weights, as its file describes it. `dtype` is a name of safetensors, such as
    BF16.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def check_model_files(folder: Path) -> list[StoredTensor]:
    """Returns the tensors of the weights. Raises ModelRefused for a folder with missing files or
    truncated weights.

    The worker checks everything else when it loads the model.
    """
    if not (folder / "config.json").exists():
        raise ModelRefused(f"{folder}: config.json is missing; give a model folder")
    read_model_json(folder / "config.json")
    return [tensor for file in _weight_files(folder) for tensor in _check_weights(file)]


def has_weights(folder: Path) -> bool:
    """Whether all files of weights are in the folder."""
    try:
        return all(file.exists() for file in _weight_files(folder))
    except ModelRefused:
        return False


def _weight_files(folder: Path) -> list[Path]:
    """Returns the files of weights, which may not exist. Raises ModelRefused if none are named."""
    if (folder / _WEIGHTS).exists():
        return [folder / _WEIGHTS]
    if (folder / _INDEX).exists():
        names = read_model_json(folder / _INDEX).get("weight_map")
        if not isinstance(names, dict):
            raise ModelRefused(
                f"{folder / _INDEX}: weight_map, from tensor names to file names, is missing"
            )
        return [folder / str(name) for name in sorted({str(name) for name in names.values()})]
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
    found = (
        f"only {', '.join(pickles[:3])}, and pickled weights can run code"
        if pickles
        else "no weights"
    )
    raise ModelRefused(
        f"{folder}: {_WEIGHTS} and {_INDEX} are missing; found {found}; convert the "
        "weights to safetensors"
    )


def _check_weights(file: Path) -> list[StoredTensor]:
    """Returns the tensors of the file. Raises ModelRefused unless the size matches the header."""
    try:
        with file.open("rb") as opened:
            size = file.stat().st_size
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise ModelRefused(
                    f"{file}: invalid or truncated safetensors file of {size} bytes; copy it again"
                )
            header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            ends = [int(tensor["data_offsets"][1]) for tensor in header.values()]
            tensors = [
                StoredTensor(
                    name,
                    str(tensor["dtype"]),
                    tuple(map(int, tensor["shape"])),
                    end - int(tensor["data_offsets"][0]),
                )
                for end, (name, tensor) in zip(ends, header.items(), strict=True)
            ]
    except OSError as error:
        raise ModelRefused(f"{file}: cannot be read: {error.strerror}") from None
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        OverflowError,
        RecursionError,
    ):
        raise ModelRefused(f"{file}: the safetensors header is invalid; copy it again") from None
    wanted = 8 + length + max(ends, default=0)
    if size != wanted:
        raise ModelRefused(
            f"{file}: the file has {size} bytes, and its header requires {wanted}; copy it again"
        )
    return tensors
