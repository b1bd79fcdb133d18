"""The bundled models, and the resolution of model names."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvrelay.errors import NotFound

DEMO = "demo"
TOKENIZER_FILE = "tokenizer.json"
_DEMO_FOLDER = Path(__file__).resolve().parent / "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def resolve_model(path: str) -> str:
    """Returns the location to load `path` from. `demo` becomes the bundled folder; an existing
    folder or a hub id stays as it is.

    Raises NotFound for anything else.
    """
    if path == DEMO:
        return str(_DEMO_FOLDER)
    if path and Path(path).is_dir():
        _check_folder(path)
        return path
    is_file = Path(path).is_file()
    if _HUB_ID.fullmatch(path) and not is_file:
        return path
    found = "it is a file, not a folder" if is_file else "there is no such folder"
    if is_file and path.endswith((".yaml", ".yml")):
        found += " (-c takes a configuration)"
    raise NotFound(
        f"model {path!r}: {found}; allowed are 'demo' (bundled), the path of an existing model "
        "folder, or a Hugging Face hub id such as 'org/name'",
        field="model",
    )


def _check_folder(path: str) -> None:
    """Raises NotFound for a folder whose files cannot be read, or only while somebody writes to
    them.
    """
    if not os.access(path, os.R_OK | os.X_OK):
        raise NotFound(f"model {path!r}: this user may not read the folder", field="model")
    for entry in Path(path).iterdir():
        if entry.is_fifo() or entry.is_socket() or entry.is_char_device():
            raise NotFound(f"model {path!r}: {entry.name} is not a regular file", field="model")


def is_on_hub(path: str) -> bool:
    """Whether a result of `resolve_model` is a hub id."""
    return not Path(path).is_dir()


def local_folder(path: str) -> str:
    """Returns the local folder for a result of `resolve_model`: the folder itself, or for a hub id
    the folder in this host's hub cache with the configuration and the tokenizer. Downloads these
    files if they are not cached. Raises NotFound.
    """
    if not is_on_hub(path):
        return path
    # Imported here, because most models are folders.
    from kvrelay.models.hub import configuration_folder

    return str(configuration_folder(path))


def has_tokenizer(path: str) -> bool:
    """Whether a model has a tokenizer. Without one, it serves token ids and no text. Downloads the
    tokenizer of a hub id if it is not cached. Raises NotFound.
    """
    return (Path(local_folder(resolve_model(path))) / TOKENIZER_FILE).is_file()
