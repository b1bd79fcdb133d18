"""What a router knows of the model: the public facts of its folder, no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.config import ModelConfig
from kvrelay.errors import ModelRefused
from kvrelay.wire.inference import ModelInfo


@dataclass(frozen=True, slots=True)
class ModelCard:
    info: ModelInfo
    vocab_size: int
    eos_token_ids: frozenset[int]

    @classmethod
    def load(cls, folder: str, config: ModelConfig) -> ModelCard:
        """Raises ModelRefused for a folder whose config.json cannot be read."""
        path = Path(folder)
        model = _read_json(path / "config.json")
        generation = _read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
        text = model.get("text_config", model)  # multimodal models keep the language model's part there
        try:
            limit = int(text["max_position_embeddings"])
            vocab_size = int(text["vocab_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise ModelRefused(f"{path / 'config.json'}: {error} is missing or not a number") from error
        eos = generation.get("eos_token_id", text.get("eos_token_id"))
        dtype = (
            config.dtype if config.dtype != "auto" else str(model.get("dtype") or model.get("torch_dtype") or "auto")
        )
        return cls(
            info=ModelInfo(
                id=path.name if Path(config.path).is_dir() else config.path,
                max_model_len=min(limit, config.max_model_len or limit),
                dtype=dtype,
                architecture=", ".join(model.get("architectures") or ["unknown"]),
                vocab_size=vocab_size,
            ),
            vocab_size=vocab_size,
            eos_token_ids=frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise ModelRefused(f"{path}: not a JSON object")
    return found
