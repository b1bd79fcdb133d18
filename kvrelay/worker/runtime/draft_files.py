"""Checks the files of a draft model, and its memory, without a model library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import ConfigError, KvRelayError, ModelRefused
from kvrelay.models import is_on_hub, local_folder, resolve_model
from kvrelay.models.model_files import check_model_files, has_weights
from kvrelay.models.model_identity import tokenizer_id
from kvrelay.models.model_json import read_config_json
from kvrelay.models.model_size import kv_layout, longest_sequence, model_dtype, weight_bytes

_KEY = "decode.speculation.model"


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """What the draft model adds to a decode worker, in bytes."""

    # 0 for a model that is not downloaded yet.
    weight_bytes: int
    kv_bytes: int

    @property
    def num_bytes(self) -> int:
        """Weights and KV."""
        return self.weight_bytes + self.kv_bytes


def check_draft_files(config: ClusterConfig, model: str) -> DraftMemory | None:
    """Returns the memory of the configured draft model; None if there is none. model: the folder or
    hub id of the model that is served.

    Raises ConfigError if there is no such draft model, its vocabulary differs or its KV memory is
    too small, and ModelRefused for damaged files. The worker checks everything else when it loads
    the draft model.
    """
    draft = config.decode.draft
    if draft is None or draft.model is None:
        return None
    try:
        resolved = resolve_model(draft.model)
        folder, own = Path(local_folder(resolved)), Path(local_folder(resolve_model(model)))
    except KvRelayError as error:
        raise ConfigError(f"{_KEY}: {error.message}") from None
    is_here = not is_on_hub(resolved) or has_weights(folder)
    try:
        tensors = check_model_files(folder) if is_here else []
    except ModelRefused as error:
        raise ModelRefused(f"{_KEY}: {error.message}") from None
    settings = read_config_json(folder)
    check_vocabulary(
        draft.model,
        (vocab_size(settings), tokenizer_id(folder)),
        (vocab_size(read_config_json(own)), tokenizer_id(own)),
    )
    dtype = model_dtype(settings, config.model.dtype)
    layout = kv_layout(settings, config.pool_kv("decode").block_size, "auto", dtype)
    longest = longest_sequence(settings, config.model.max_model_len)
    if layout is not None and longest:
        check_memory(draft.memory, layout.blocks_for(longest) * layout.block_bytes, longest)
    packs = not config.decode.resources.num_gpus
    weights = weight_bytes(tensors, dtype, config.decode.weights, packs=packs)
    return DraftMemory(weights, draft.memory)


def check_vocabulary(
    name: str, found: tuple[int | None, str], served: tuple[int | None, str]
) -> None:
    """Raises ConfigError unless the draft model `name` has the vocabulary of the served model, each
    given as the size, None if unknown, and the tokenizer's hash.
    """
    if None not in (found[0], served[0]) and found[0] != served[0]:
        raise ConfigError(
            f"{_KEY}: {name} has a vocabulary of {found[0]} tokens, and the served model has "
            f"{served[0]}; set it to a smaller model of the same family"
        )
    if found[1] != served[1]:
        raise ConfigError(
            f"{_KEY}: {name} has other tokenizer files than the served model, so its tokens would "
            "mean other text; set it to a model with the same tokenizer files"
        )


def check_memory(kv_bytes: int, needed: int, longest: int) -> None:
    """Raises ConfigError unless the memory holds one sequence of `longest` tokens."""
    if kv_bytes < needed:
        raise ConfigError(
            f"decode.speculation.memory: {kv_bytes} bytes do not hold the draft model's KV of one "
            f"sequence of {longest} tokens, which takes {needed} bytes; set it to at least that, "
            "or lower model.max_model_len"
        )


def vocab_size(settings: Mapping[str, Any]) -> int | None:
    """Returns the size of the vocabulary by config.json; None if it is unknown."""
    text = settings.get("text_config")
    for source in (settings, text if isinstance(text, dict) else {}):
        size = source.get("vocab_size")
        if type(size) is int:
            return size
    return None
