"""The models that come with kvrelay, and what a model's name may be."""

from __future__ import annotations

import re
from pathlib import Path

from kvrelay.errors import NotFound

DEMO = "demo"
_DEMO_FOLDER = Path(__file__).resolve().parent / "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def resolve_model(path: str) -> str:
    """Where to load `path` from: `demo` is the bundled folder; an existing folder and a hub id stay
    as they are.

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
    """Of what `resolve_model` returned: the folder itself, or, of a hub id, that of the hub's cache
    on this host, with configuration and tokenizer in it; they are downloaded where they are not
    cached. Raises NotFound.
    """
    if Path(path).is_dir():
        return path
    from huggingface_hub import snapshot_download  # here: most models are folders

    try:
        return str(snapshot_download(path, allow_patterns=["*.json", "*.jinja"]))
    except Exception as error:  # network, hub or name: the library has many kinds of these
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise NotFound(
            f"model {path!r}: there is no such folder, and the Hugging Face hub does not give it: "
            f"{reason:.200}",
            field="model",
        ) from error
