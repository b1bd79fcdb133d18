"""The files of a LoRA adapter, read once: what is checked and hashed is what is loaded."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from kvrelay.errors import ModelRefused
from kvrelay.models.adapters.peft_config import PeftConfig

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pkl")
MAX_CONFIG_BYTES = 2**20
MAX_WEIGHT_BYTES = 2**31
# Bytes of the header of the weights, and tensors in it.
MAX_HEADER_BYTES = 16 * 2**20
MAX_TENSORS = 2**13
# Characters of a module's name. A match with a pattern may take the third power of it.
MAX_NAME = 128
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_PREFIX = "base_model.model."
_SIDES = {".lora_A.weight": "a", ".lora_B.weight": "b"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A matrix in the file of weights: bytes [start, end) of the file."""

    dtype: str
    rows: int
    columns: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StoredFactors:
    """The two factors of one module's update: a [rank, inputs] and b [outputs, rank]."""

    a: StoredTensor
    b: StoredTensor


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A checked adapter folder. The update of a module is scale · b a."""

    # XXH3-128 over both files, hexadecimal.
    adapter_id: str
    config: PeftConfig
    # By the module's name in the base model.
    factors: dict[str, StoredFactors]
    # The file of weights.
    data: bytes = field(repr=False)


def read_adapter(folder: str, max_rank: int) -> AdapterFiles:
    """Reads and checks a folder in PEFT's format. Raises ModelRefused with the first problem."""
    path = Path(folder)
    # Unlike Path.is_dir, isdir raises for no text.
    if not os.path.isdir(folder):
        what = "is a file" if os.path.isfile(folder) else "there is no such folder"
        raise ModelRefused(f"{folder}: {what}; give the folder of an adapter")
    settings = _read(path, CONFIG, MAX_CONFIG_BYTES)
    weights = _read(path, WEIGHTS, MAX_WEIGHT_BYTES)
    config = PeftConfig.parse(_json(settings, path / CONFIG), str(path / CONFIG))
    if config.largest_rank > max_rank:
        raise ModelRefused(
            f"{path / CONFIG}: the rank is {config.largest_rank}; allowed is adapters.max_rank, "
            f"{max_rank}"
        )
    try:
        factors = _factors(_tensors(weights), config)
    except ValueError as error:
        raise ModelRefused(f"{path / WEIGHTS}: {error}") from None
    digest = xxhash.xxh3_128()
    for name, content in ((CONFIG, settings), (WEIGHTS, weights)):
        digest.update(f"{name} {len(content)} ".encode())
        digest.update(content)
    return AdapterFiles(digest.hexdigest(), config, factors, weights)


def _read(folder: Path, name: str, most: int) -> bytes:
    """The bytes of a file that lies in the folder, links included. Raises ModelRefused."""
    path = folder / name
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError:
        raise ModelRefused(_missing(folder, name)) from None
    except (OSError, RuntimeError) as error:
        raise ModelRefused(f"{path}: cannot be read: {error!s:.200}") from None
    if not real.is_relative_to(folder.resolve()):
        raise ModelRefused(
            f"{path}: the link points outside of the adapter's folder; copy the file into the "
            "folder"
        )
    try:
        # O_NONBLOCK, because the open of a pipe would wait for its writer.
        descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ModelRefused(f"{path}: is not a regular file")
            if found.st_size > most:
                raise ModelRefused(f"{path}: has {found.st_size} bytes; allowed are {most}")
            content = file.read(found.st_size + 1)
    except OSError as error:
        raise ModelRefused(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(content) != found.st_size:
        raise ModelRefused(
            f"{path}: the file changed while it was read; load it again when the copy is complete"
        )
    return content


def _missing(folder: Path, name: str) -> str:
    pickles = [one for one in PICKLES if (folder / one).exists()]
    if name == WEIGHTS and pickles:
        return (
            f"{folder}: {WEIGHTS} is missing; found only {pickles[0]}, and pickled weights can run "
            "code; save the adapter again with safe_serialization"
        )
    return f"{folder}: {name} is missing; give the folder of a PEFT adapter"


def _json(content: bytes, where: Path | str) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelRefused(
            f"{where}: it is not JSON, so the file is damaged or not from PEFT: {error!s:.200}"
        ) from None
    if not isinstance(value, dict):
        raise ModelRefused(f"{where}: the content is not a JSON object")
    return value


def _tensors(content: bytes) -> dict[str, StoredTensor]:
    """The matrices of a safetensors file, by name. Raises ValueError for a header that does not
    describe the file.
    """
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or not 2 <= size <= min(MAX_HEADER_BYTES, len(content) - 8):
        raise ValueError("invalid safetensors file: the header is longer than the file, or empty")
    try:
        header = json.loads(content[8 : 8 + size])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"invalid safetensors file: {error!s:.100}") from None
    if not isinstance(header, dict):
        raise ValueError("invalid safetensors file: the header is not a JSON object")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise ValueError(f"{len(header)} tensors; allowed are {MAX_TENSORS}")
    end = 8 + size
    tensors = {name: _tensor(name, entry, end) for name, entry in header.items()}
    for one in sorted(tensors.values(), key=lambda tensor: tensor.start):
        if one.start != end:
            raise ValueError("invalid safetensors file: tensors overlap or leave gaps")
        end = one.end
    if end != len(content):
        raise ValueError(f"invalid safetensors file: {len(content)} bytes, {end} are described")
    return tensors


def _tensor(name: str, entry: object, data: int) -> StoredTensor:
    """The matrix of an entry whose offsets count from `data`. Raises ValueError."""
    match entry:
        case {
            "dtype": str(dtype),
            "shape": [int(rows), int(columns)],
            "data_offsets": [int(start), int(end)],
        } if dtype in DTYPE_BYTES and min(rows, columns) > 0 <= start:
            if end - start != math.prod((rows, columns)) * DTYPE_BYTES[dtype]:
                raise ValueError(f"{name!r:.120} has another size than its shape tells")
            return StoredTensor(dtype, rows, columns, data + start, data + end)
    raise ValueError(
        f"{name!r:.120} is not a matrix of {', '.join(DTYPE_BYTES)}; only the factors of linear "
        "layers are supported"
    )


def _factors(tensors: dict[str, StoredTensor], config: PeftConfig) -> dict[str, StoredFactors]:
    """Pairs the tensors of each module. Raises ValueError."""
    if not tensors:
        raise ValueError("the adapter has no tensors")
    sides: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        module, side = _module(name)
        if not config.targets_module(module):
            raise ValueError(f"{name!r:.120} is of a module that target_modules does not name")
        sides.setdefault(module, {})[side] = tensor
    return {module: _pair(module, found, config) for module, found in sides.items()}


def _module(name: str) -> tuple[str, str]:
    """The module of a tensor, and the tensor's side. Raises ValueError."""
    for end, side in _SIDES.items():
        if name.startswith(_PREFIX) and name.endswith(end):
            module = name[len(_PREFIX) : -len(end)]
            if len(module) > MAX_NAME:
                raise ValueError(
                    f"{module!r:.60} has {len(module)} characters; the name of a module has at "
                    f"most {MAX_NAME}"
                )
            return module, side
    if "lora_embedding" in name:
        raise ValueError(f"{name!r:.120} changes embeddings, which is not supported")
    if "lora_magnitude" in name:
        raise ValueError(f"{name!r:.120} belongs to DoRA, which is not supported")
    raise ValueError(
        f"{name!r:.120} is not a factor of a LoRA layer; allowed are "
        f"{_PREFIX}MODULE.lora_A.weight and {_PREFIX}MODULE.lora_B.weight"
    )


def _pair(module: str, found: dict[str, StoredTensor], config: PeftConfig) -> StoredFactors:
    missing = [name for name, side in _SIDES.items() if side not in found]
    if missing:
        raise ValueError(f"{module}{missing[0]} is missing")
    a, b, rank = found["a"], found["b"], config.rank_of(module)
    if a.rows != rank or b.columns != rank:
        raise ValueError(
            f"{module} has factors [{a.rows}, {a.columns}] and [{b.rows}, {b.columns}], and its "
            f"rank is {rank}"
        )
    return StoredFactors(a, b)


def missing_modules(files: AdapterFiles, modules: Iterator[str]) -> list[str]:
    """The modules of the base model that the adapter's list of targets names, and for which it has
    no tensors. Empty if a regular expression or a range of layers chose the modules.
    """
    config = files.config
    if config.targets is None or not config.complete:
        return []
    return [one for one in modules if config.targets_module(one) and one not in files.factors]
