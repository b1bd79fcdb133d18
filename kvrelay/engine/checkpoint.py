"""A model folder's files, checked before anything of them is loaded."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import ModelRefused


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    model_id: str


def find_checkpoint(path: str) -> Checkpoint:
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ModelRefused(f"{path}: no config.json")
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=8)
    return Checkpoint(folder, digest.hexdigest())
