"""What each layer of a model keeps: KV of all tokens, of a window, a latent vector, or a state."""

from __future__ import annotations

from typing import Literal

from kvrelay.errors import ModelRefused
from kvrelay.models.shape_keys import ShapeKeys

# full and sliding: K and V of each token. latent: one compressed vector of each token, which K and
# V are computed from (MLA). state: of a fixed size for each sequence. shared: the KV of an earlier
# layer. none: no attention.
LayerKind = Literal["full", "sliding", "latent", "state", "shared", "none"]
Kinds = tuple[tuple[LayerKind, int], ...]
_BY_NAME: dict[str, LayerKind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "state",
    "mamba": "state",
    "mamba2": "state",
    "conv": "state",
    "recurrent": "state",
    "recurrent_gemma": "state",
    "mlp": "none",
    "moe": "none",
    "hybrid": "full",
}
# Families in which every n-th layer attends to all tokens, and the others to a window.
_PERIODS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "gpt_oss": 2}
# Families whose layers all have the window of the configuration.
_ALL_SLIDING = {"mistral", "mixtral", "phi3", "starcoder2", "phimoe", "ministral"}
_LETTERS: dict[str, LayerKind] = {"M": "state", "-": "none", "*": "full", "E": "none"}


def layer_kinds(keys: ShapeKeys) -> Kinds:
    """Returns the kind of each layer, and its window in tokens; 0 for none. Raises ModelRefused."""
    number = keys.num_layers
    kinds = _named(keys, number) or _by_rule(keys, number)
    if keys.optional("kv_lora_rank"):
        kinds = ["latent" if kind == "full" else kind for kind in kinds]
    shared = keys.optional("num_kv_shared_layers")
    if shared > number:
        raise ModelRefused(
            f"config.json: num_kv_shared_layers is {shared}, and the model has {number} layers"
        )
    if shared:
        kinds[number - shared :] = ["shared"] * shared
    window = keys.optional("sliding_window", "attention_chunk_size", "attention_window_size")
    # A window of 0 is none.
    return tuple(
        ("full", 0) if kind == "sliding" and not window else (kind, window * (kind == "sliding"))
        for kind in kinds
    )


def _named(keys: ShapeKeys, number: int) -> list[LayerKind] | None:
    """Returns the kinds that the configuration lists, or None without a list."""
    if pattern := keys.values.get("hybrid_override_pattern"):
        if not isinstance(pattern, str) or not set(pattern) <= _LETTERS.keys():
            raise ModelRefused(
                f"config.json: hybrid_override_pattern is {pattern!r:.60}; it must consist of "
                f"{''.join(_LETTERS)}"
            )
        kinds = [_LETTERS[letter] for letter in pattern]
        return _of_length(kinds, number, "hybrid_override_pattern")
    for name in ("layer_types", "layers_block_type"):
        if (given := keys.names(name)) is not None:
            if unknown := set(given) - _BY_NAME.keys():
                raise ModelRefused(
                    f"config.json: {name} has {min(unknown)!r:.60}; known are {', '.join(_BY_NAME)}"
                )
            return _of_length([_BY_NAME[one] for one in given], number, name)
    return None


def _of_length(kinds: list[LayerKind], number: int, name: str) -> list[LayerKind]:
    if len(kinds) != number:
        raise ModelRefused(
            f"config.json: {name} has {len(kinds)} entries for {number} layers; one is wrong"
        )
    return kinds


def _by_rule(keys: ShapeKeys, number: int) -> list[LayerKind]:
    """Returns the kinds that follow from the other keys."""
    if period := keys.optional("full_attention_interval"):
        return _every(number, period, "state")
    if period := keys.optional("attn_layer_period"):
        offset = keys.optional("attn_layer_offset")
        return ["full" if index % period == offset else "state" for index in range(number)]
    if indices := set(keys.indices("attn_layer_indices")):
        return ["full" if index in indices else "state" for index in range(number)]
    if keys.model_type == "recurrent_gemma" and (cycle := keys.names("block_types")):
        return [
            "sliding" if cycle[index % len(cycle)] == "attention" else "state"
            for index in range(number)
        ]
    if keys.model_type == "bamba":
        return ["state"] * number
    if not keys.optional("sliding_window") or keys.flag("use_sliding_window") is False:
        return ["full"] * number
    if keys.model_type in _PERIODS:
        given = keys.optional("sliding_window_pattern", "_sliding_window_pattern")
        return _every(number, given or _PERIODS[keys.model_type], "sliding")
    if keys.flag("use_sliding_window"):
        first = keys.optional("max_window_layers")
        return ["sliding" if index >= first else "full" for index in range(number)]
    every: LayerKind = "sliding" if keys.model_type in _ALL_SLIDING else "full"
    return [every] * number


def _every(number: int, period: int, others: LayerKind) -> list[LayerKind]:
    """Returns kinds of which every `period`-th is full."""
    return ["full" if (index + 1) % period == 0 else others for index in range(number)]
