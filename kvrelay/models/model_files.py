"""Checks the files of a model folder without a model library, for processes that only start
others.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvrelay.errors import ModelRefused
from kvrelay.models.model_json import read_model_json

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
# Bytes; the limit of the safetensors format.
_MAX_HEADER = 100 * 2**20


def check_model_files(folder: Path) -> int:
    """Returns the bytes of the weights. Raises ModelRefused for a folder with missing files or
    truncated weights.

    The worker checks everything else when it loads the model.
    """
    if not (folder / "config.json").exists():
        raise ModelRefused(f"{folder}: config.json is missing; give a model folder")
    read_model_json(folder / "config.json")
    if (folder / _WEIGHTS).exists():
        files = [folder / _WEIGHTS]
    elif (folder / _INDEX).exists():
        names = read_model_json(folder / _INDEX).get("weight_map")
        if not isinstance(names, dict):
            raise ModelRefused(
                f"{folder / _INDEX}: weight_map, from tensor names to file names, is missing"
            )
        files = [folder / str(name) for name in sorted({str(name) for name in names.values()})]
    else:
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
    return sum(_check_weights(file) for file in files)


def _check_weights(file: Path) -> int:
    """Returns the bytes of the file. Raises ModelRefused unless the size matches the header."""
    try:
        with file.open("rb") as opened:
            size = file.stat().st_size
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise ModelRefused(
                    f"{file}: invalid or truncated safetensors file of {size} bytes; copy it again"
                )
            tensors = json.loads(opened.read(length))
            ends = [
                int(tensor["data_offsets"][1])
                for name, tensor in tensors.items()
                if name != "__metadata__"
            ]
    except OSError as error:
        raise ModelRefused(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise ModelRefused(f"{file}: the safetensors header is invalid; copy it again") from None
    wanted = 8 + length + max(ends, default=0)
    if size != wanted:
        raise ModelRefused(
            f"{file}: the file has {size} bytes, and its header requires {wanted}; copy it again"
        )
    return size
