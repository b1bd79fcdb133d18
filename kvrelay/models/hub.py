"""Models of the Hugging Face hub, in this host's cache.

`python -m kvrelay.models.hub ORG/NAME` downloads a model, for processes that must be able to stop
the download. It prints two JSON objects, one per line: what is to be downloaded, and the result.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from kvrelay.errors import NotFound

_INDEX = "model.safetensors.index.json"
# The configuration, the tokenizer and the chat template.
_CONFIGURATION = ("*.json", "*.jinja")
# Other formats of the same model.
_SUBFOLDERS = "*/*"


@dataclass(frozen=True, slots=True)
class MissingFiles:
    """The files of a model that are not in the cache yet."""

    # The folder of the cache that the files come into.
    folder: str
    num_bytes: int


def configuration_folder(model: str) -> Path:
    """Returns the folder in the cache with the model's configuration and tokenizer. Downloads what
    is missing. Raises NotFound.
    """
    return Path(_snapshot(model, _CONFIGURATION))


def model_folder(model: str) -> Path:
    """Returns the folder in the cache with all files that kvrelay reads: the configuration, the
    tokenizer and weights in safetensors. Downloads what is missing. Raises NotFound.
    """
    return Path(_snapshot(model, _wanted(model)))


def cache_of(snapshot: Path) -> Path | None:
    """Returns the cache that a model's folder belongs to. Returns None for a folder elsewhere.

    The files of such a folder are links to blobs that several models may share.
    """
    in_cache = snapshot.parent.name == "snapshots" and snapshot.parents[1].name.startswith("models")
    return snapshot.parents[2] if in_cache else None


def missing_files(model: str) -> MissingFiles:
    """Returns what `model_folder` would download. Raises NotFound."""
    from huggingface_hub import constants

    folder = str(Path(constants.HF_HUB_CACHE).expanduser())
    if constants.HF_HUB_OFFLINE:
        return MissingFiles(folder, 0)
    files = _snapshot(model, _wanted(model), dry_run=True)
    return MissingFiles(folder, sum(one.file_size or 0 for one in files if one.will_download))


def _wanted(model: str) -> tuple[str, ...]:
    """The files to download. Repositories often have the weights twice, in other formats."""
    index = configuration_folder(model) / _INDEX
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    # The loader refuses a bad index.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        names = set()
    return (*_CONFIGURATION, *(sorted(names) or ["model.safetensors"]))


def _snapshot(model: str, patterns: tuple[str, ...], *, dry_run: bool = False) -> Any:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    # It logs tracebacks of each try. What counts is in the error.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        return snapshot_download(
            model,
            allow_patterns=list(patterns),
            ignore_patterns=[_SUBFOLDERS],
            dry_run=dry_run,
        )
    except DryRunError:
        # The hub cannot be reached. What is in the cache may be enough.
        return []
    except Exception as error:
        # The library has many error types for network, hub and name errors.
        raise NotFound(f"model {model!r}: {_reason(error)}", field="model") from error


def _reason(error: Exception) -> str:
    """Says why the hub cannot provide the model, and what to do."""
    from huggingface_hub import constants, errors

    if not constants.ENDPOINT.startswith(("http://", "https://")):
        return (
            f"the folder does not exist, and HF_ENDPOINT is {constants.ENDPOINT!r:.80}; it must "
            "begin with https:// or http://"
        )
    if isinstance(error, errors.GatedRepoError):
        return (
            "the folder does not exist, and the Hugging Face hub gives this model only to users "
            "who accept its terms: accept them on the model's page, and set HF_TOKEN"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"the folder does not exist, and {constants.ENDPOINT} has no such model, or it is "
            "private: check the name, or set HF_TOKEN"
        )
    if isinstance(error, errors.IncompleteSnapshotError):
        found = f"only a part of the model is in {constants.HF_HUB_CACHE}"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        found = f"the folder does not exist, and the model is not in {constants.HF_HUB_CACHE}"
    else:
        words = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"the Hugging Face hub cannot provide the model: {words:.200}"
    if constants.HF_HUB_OFFLINE:
        return (
            f"{found}; HF_HUB_OFFLINE forbids a download: unset it, or download the model "
            "elsewhere and give its folder"
        )
    return (
        f"{found}; the Hugging Face hub cannot be reached at {constants.ENDPOINT}: check the "
        "connection and HF_ENDPOINT, or download the model elsewhere and give its folder"
    )


def main(model: str) -> int:
    """Downloads the model. Returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: _stop())
    try:
        print(json.dumps(asdict(missing_files(model))), flush=True)
        print(json.dumps({"model_folder": str(model_folder(model))}), flush=True)
    except NotFound as error:
        print(json.dumps({"error": error.message}), flush=True)
        return 1
    return 0


def _stop() -> NoReturn:
    """Ends the process at once. Removes the parts of files that it was writing, because the
    library never continues them.
    """
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            file = descriptor.readlink()
            if file.suffix == ".incomplete":
                file.unlink()
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
