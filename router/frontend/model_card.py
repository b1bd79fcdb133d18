"""The model card: public facts of the model's folder, without weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvrelay.config.model_sections import ModelConfig
from kvrelay.errors import ModelRefused
from kvrelay.models.model_identity import tokenizer_id
from kvrelay.models.model_json import read_model_json, text_config
from kvrelay.types.workers import WorkerInfo
from kvrelay.wire.inference import ModelInfo, SamplingOptions
from router.core.compatibility import misfit
from router.frontend.adapter_cards import AdapterCards
from router.frontend.sampling_defaults import sampling_defaults

# Limits on the reported architectures and on the characters of each.
_MAX_NAMES, _MAX_NAME = 8, 100
# The most common names of the context length.
_LIMITS = ("max_position_embeddings", "n_positions")
# Timeout of a process that imports transformers on a busy machine.
_ASK_S = 120.0

Ask = Callable[[str], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The facts of the model that the router needs."""

    info: ModelInfo
    vocab_size: int
    eos_token_ids: frozenset[int]
    # Hash of the files that define the vocabulary.
    tokenizer_id: str = ""
    # The model's folder. Empty for a model without files.
    folder: str = ""
    # Of requests that leave them open.
    sampling_defaults: SamplingOptions = field(default_factory=SamplingOptions)
    adapters: AdapterCards = field(default_factory=AdapterCards)

    @property
    def models(self) -> list[ModelInfo]:
        """The model and its adapters, as clients see them."""
        base = replace(self.info, root=self.info.id)
        return [
            base,
            *(replace(base, id=one.name, parent=base.id, root=one.root) for one in self.adapters),
        ]

    def misfit(self, info: WorkerInfo) -> str:
        """Returns the reason why this router cannot use the worker. Empty if it can."""
        return misfit(info, self.vocab_size, self.tokenizer_id)

    @classmethod
    def load(cls, folder: str, config: ModelConfig, ask: Ask | None = None) -> ModelCard:
        """Reads the model's folder. `ask` supplies sizes that config.json omits or stores under
        another name.

        Raises ModelRefused if config.json or generation_config.json cannot be read or used.
        """
        path = Path(folder)
        model = read_model_json(path / "config.json")
        defaults = path / "generation_config.json"
        generation = read_model_json(defaults) if defaults.exists() else {}
        try:
            recommended = sampling_defaults(generation)
        except ValueError as error:
            raise ModelRefused(f"{defaults}: {error}") from error
        text = text_config(model)
        try:
            found = next((name for name in _LIMITS if name in text), _LIMITS[0])
            if ask is not None and not {found, "vocab_size"} <= text.keys():
                text, found = {**text, **ask(folder)}, _LIMITS[0]
            vocab_size = _count(text, "vocab_size")
            limit = _longest(text, found, config.max_model_len, path)
            eos = _ids(generation.get("eos_token_id", text.get("eos_token_id")))
            architectures = [
                str(one)[:_MAX_NAME] for one in model.get("architectures") or ["unknown"]
            ]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelRefused(
                f"{path / 'config.json'}: {error!s:.300} is missing or has the wrong type"
            ) from error
        dtype = (
            config.dtype
            if config.dtype != "auto"
            else str(model.get("dtype") or model.get("torch_dtype") or "auto")
        )
        return cls(
            info=ModelInfo(
                id=config.name or (path.name if Path(config.path).is_dir() else config.path),
                max_model_len=min(limit, config.max_model_len or limit),
                dtype=dtype,
                architecture=", ".join(architectures[:_MAX_NAMES]),
                vocab_size=vocab_size,
            ),
            vocab_size=vocab_size,
            eos_token_ids=eos,
            tokenizer_id=tokenizer_id(path),
            folder=str(path),
            sampling_defaults=recommended,
        )


def _count(config: Mapping[str, Any], name: str) -> int:
    """Returns a positive 32-bit integer of the configuration. Raises KeyError, TypeError or
    ValueError otherwise.
    """
    number = config[name]
    if type(number) is not int or not 0 < number < 2**31:
        raise ValueError(f"{name} {number!r:.40}")
    return number


def _longest(config: Mapping[str, Any], name: str, wanted: int | None, folder: Path) -> int:
    """Returns the longest sequence of the model in tokens. State-space models have none, and
    `wanted` counts. Raises KeyError, TypeError, ValueError, and ModelRefused if there is neither.
    """
    if config.get(name, ...) is not None:
        return _count(config, name)
    if wanted is None:
        raise ModelRefused(
            f"{folder / 'config.json'}: {name} is null, so the model names no longest sequence; "
            "set model.max_model_len"
        )
    return wanted


def _ids(found: object) -> frozenset[int]:
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(one) is int for one in ids):
        raise ValueError(f"eos_token_id {found!r:.40}")
    return frozenset(ids)


def ask_transformers(folder: str) -> dict[str, Any]:
    """Returns the folder's configuration as transformers reads it, from a separate process: the
    router does not import transformers.

    Raises ModelRefused.
    """
    command = [sys.executable, "-m", "kvrelay.engine.model.facts", folder]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_S
        )
    except subprocess.TimeoutExpired:
        raise ModelRefused(
            f"{folder}: transformers did not read its config.json within {_ASK_S:g} s"
        ) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelRefused(f"{folder}: transformers cannot read its config.json: {reason:.300}")
    return dict(json.loads(done.stdout.splitlines()[-1]))
