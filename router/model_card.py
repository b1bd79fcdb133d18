"""What a router knows of the model: the public facts of its folder, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.config import ModelConfig
from kvrelay.errors import ModelRefused
from kvrelay.model_json import read_model_json
from kvrelay.wire.inference import ModelInfo

_MAX_NAMES, _MAX_NAME = 8, 100  # architectures, and characters of each, that are told


@dataclass(frozen=True, slots=True)
class ModelCard:
    info: ModelInfo
    vocab_size: int
    eos_token_ids: frozenset[int]

    @classmethod
    def load(cls, folder: str, config: ModelConfig) -> ModelCard:
        """Raises ModelRefused for a folder whose config.json cannot be read."""
        path = Path(folder)
        model = read_model_json(path / "config.json")
        defaults = path / "generation_config.json"
        generation = read_model_json(defaults) if defaults.exists() else {}
        text = model.get("text_config", model)  # multimodal models keep the language model's part there
        try:
            limit, vocab_size = (_count(text, name) for name in ("max_position_embeddings", "vocab_size"))
            eos = _ids(generation.get("eos_token_id", text.get("eos_token_id")))
            architectures = [str(one)[:_MAX_NAME] for one in model.get("architectures") or ["unknown"]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelRefused(
                f"{path / 'config.json'}: {error!s:.300}, which is missing or of the wrong type"
            ) from error
        dtype = (
            config.dtype if config.dtype != "auto" else str(model.get("dtype") or model.get("torch_dtype") or "auto")
        )
        return cls(
            info=ModelInfo(
                id=path.name if Path(config.path).is_dir() else config.path,
                max_model_len=min(limit, config.max_model_len or limit),
                dtype=dtype,
                architecture=", ".join(architectures[:_MAX_NAMES]),
                vocab_size=vocab_size,
            ),
            vocab_size=vocab_size,
            eos_token_ids=eos,
        )


def _count(config: dict[str, Any], name: str) -> int:
    """Raises KeyError, TypeError or ValueError for what is no number that gRPC can tell, from 1 on."""
    number = config[name]
    if type(number) is not int or not 0 < number < 2**31:
        raise ValueError(f"{name} {number!r:.40}")
    return number


def _ids(found: object) -> frozenset[int]:
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(one) is int for one in ids):
        raise ValueError(f"eos_token_id {found!r:.40}")
    return frozenset(ids)
