"""The bundled models, and the resolution of model names."""

from __future__ import annotations

import re
from pathlib import Path

from kvrelay.errors import NotFound

DEMO = "demo"
_DEMO_FOLDER = Path(__file__).resolve().parent / "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def resolve_model(path: str) -> str:
    """Returns the location to load `path` from. `demo` becomes the bundled folder; an existing
    folder or a hub id stays as it is.

    Raises NotFound for anything else.
    """
    if path == DEMO:
        return str(_DEMO_FOLDER)
    if (path and Path(path).is_dir()) or _HUB_ID.fullmatch(path):
        return path
    found = "it is a file, not a folder" if Path(path).is_file() else "there is no such folder"
    raise NotFound(
        f"model {path!r}: {found}; allowed are 'demo' (bundled), the path of an existing model "
        "folder, or a Hugging Face hub id such as 'org/name'",
        field="model",
    )


def local_folder(path: str) -> str:
    """Returns the local folder for a result of `resolve_model`: the folder itself, or for a hub id
    the folder in this host's hub cache with the configuration and the tokenizer. Downloads these
    files if they are not cached. Raises NotFound.
    """
    if Path(path).is_dir():
        return path
    # Imported here, because most models are folders.
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(path, allow_patterns=["*.json", "*.jinja"]))
    except Exception as error:
        # The library has many error types for network, hub and name errors.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise NotFound(
            f"model {path!r}: the folder does not exist, and the Hugging Face hub cannot "
            f"provide the model: {reason:.200}; check the name and the connection, or download it "
            f"elsewhere and give its folder",
            field="model",
        ) from error
