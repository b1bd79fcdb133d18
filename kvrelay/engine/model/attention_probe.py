"""Determines what a model's attention needs by running the model, not by the names in its
configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvrelay.engine.attention import paged_attention
from kvrelay.engine.attention.latent_attention import absorbed
from kvrelay.errors import ModelRefused
from kvrelay.types.kv_layout import LayerKv

NAME = "kvrelay_probe"
# Dtypes that a model may attend in.
DTYPES = ("float32", "bfloat16", "float16")
# Replaces the batch, to test whether keyword arguments reach attention.
_MARK = object()
# Layers that an error names.
_SHOWN = 5
# (batch, head, query, key) -> True where the query attends to the key.
MaskRule = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]

# Keyword arguments that may reach attention. HONOURED ones are applied; HARMLESS ones change
# nothing here.
HONOURED = {"scaling", "sliding_window", "softcap", "s_aux", "ragged_batch"}
HARMLESS = {
    *(
        "dropout",
        "is_causal",
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
    ),
    # From models that pass on all their keyword arguments.
    "logits_to_keep",
}


@dataclass(frozen=True, slots=True)
class _Call:
    layer: int | None
    kv: LayerKv
    dtypes: set[str]
    mask: torch.Tensor | None
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of `probe`."""

    layers: tuple[LayerKv, ...]
    # The dtype that all layers attend in.
    dtype: str
    # True if the model does not pass unknown keyword arguments on to its attention.
    drops_keywords: bool
    # The tokens that each layer attends to; 0 for all of the longest sequence.
    windows: tuple[int, ...] = ()


def probe(model: PreTrainedModel, num_layers: int, max_len: int) -> Probed:
    """Determines what a model's attention needs, from one forward pass over two tokens.

    Raises ModelRefused unless each layer attends exactly once, under a rule that paged attention
    follows: causal, with or without a window, over all of max_len positions, and without unknown
    keyword arguments.
    """
    calls: list[_Call] = []
    # By id of the mask that stands for the rule.
    rules: dict[int, MaskRule] = {}
    # Kept so that ids stay unique.
    masks: list[torch.Tensor] = []

    def record_mask(
        *, q_length: int, kv_length: int, mask_function: MaskRule, **_: Any
    ) -> torch.Tensor:
        masks.append(torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=model.device))
        rules[id(masks[-1])] = mask_function
        return masks[-1]

    def record(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        latent = absorbed(module)
        kv = LayerKv(key.shape[1], key.shape[-1], value.shape[-1], v_in_k=latent is not None)
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in (query, key, value)}
        calls.append(_Call(getattr(module, "layer_idx", None), kv, dtypes, attention_mask, kwargs))
        out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
        return out if latent is None else latent.output(out), None

    AttentionInterface.register(NAME, record)
    AttentionMaskInterface.register(NAME, record_mask)
    model.set_attn_implementation(NAME)
    positions = torch.arange(2, device=model.device)[None]
    with torch.inference_mode():
        output = model(
            input_ids=torch.ones_like(positions),
            position_ids=positions,
            use_cache=False,
            logits_to_keep=positions[0, 1:],
            ragged_batch=_MARK,
        )
    model.set_attn_implementation(paged_attention.NAME)

    kind = type(model).__name__
    if output.logits.shape[:2] != (1, 1):
        raise ModelRefused(
            f"{kind} computes the logits of all tokens and cannot be limited to some of them"
        )
    _check_layers(kind, [call.layer for call in calls], num_layers)
    windows = _cached_windows(model.config.get_text_config(decoder=True), num_layers)
    for call, kept in zip(calls, windows, strict=True):
        _check(f"{kind}, layer {call.layer}", call, rules, max_len, kept)
    dtypes = set[str]().union(*(call.dtypes for call in calls))
    if len(dtypes) > 1 or not dtypes.issubset(DTYPES):
        raise ModelRefused(
            f"{kind} computes attention in {', '.join(sorted(dtypes))}; supported is one of "
            f"{', '.join(DTYPES)} for all layers"
        )
    drops_keywords = any(call.kwargs.get("ragged_batch") is not _MARK for call in calls)
    found = [call.kwargs.get("sliding_window") or 0 for call in calls]
    return Probed(
        tuple(call.kv for call in calls),
        dtypes.pop(),
        drops_keywords,
        tuple(window if window < max_len else 0 for window in found),
    )


def _check_layers(kind: str, found: list[int | None], num_layers: int) -> None:
    if found == list(range(num_layers)):
        return
    missing = sorted(set(range(num_layers)) - {layer for layer in found if layer is not None})
    if missing:
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        raise ModelRefused(
            f"{kind}: {len(missing)} of {num_layers} layers have no KV cache of their own "
            f"(layers {shown}); layers with other state or shared KV are not supported"
        )
    raise ModelRefused(
        f"{kind}: {num_layers} layers compute attention {len(found)} times in one pass; "
        "supported is once per layer, in order"
    )


def _cached_windows(config: PreTrainedConfig, num_layers: int) -> list[int]:
    """The number of tokens whose KV transformers' own cache keeps, by layer; 0 for all.

    All zeros if the cache does not report its windows.
    """
    layers = getattr(DynamicCache(config=config), "layers", [])
    windows = [int(getattr(layer, "sliding_window", None) or 0) for layer in layers]
    return windows if len(windows) == num_layers else [0] * num_layers


def _check(where: str, call: _Call, rules: dict[int, MaskRule], max_len: int, kept: int) -> None:
    unknown = {
        name
        for name, value in call.kwargs.items()
        if name not in HONOURED | HARMLESS and value is not None and value is not False
    }
    if unknown:
        raise ModelRefused(f"{where}: attention with {', '.join(sorted(unknown))} is not supported")
    if call.kwargs.get("is_causal") is False:
        raise ModelRefused(f"{where}: attention is not causal")
    rule = rules.get(id(call.mask))
    if rule is None:
        raise ModelRefused(
            f"{where}: the model passes its own attention mask, which is not supported"
        )
    window = call.kwargs.get("sliding_window") or max_len
    edges = {0, 1, window - 1, window, window + 1, max_len // 2, max_len - 1}
    queries = torch.tensor(sorted(q for q in edges if 0 <= q < max_len))[:, None]
    keys = torch.arange(max_len)[None, :]
    ours = (keys <= queries) & (keys > queries - window)
    try:
        theirs = torch.as_tensor(rule(0, 0, queries, keys))
    except IndexError:
        raise ModelRefused(
            f"{where}: the attention mask depends on token types, which is not supported"
        ) from None
    if not torch.equal(theirs.expand_as(ours), ours):
        raise ModelRefused(
            f"{where}: the attention mask is neither causal nor a sliding window of {window} tokens"
        )
    if kept and kept < min(window, max_len):
        raise ModelRefused(
            f"{where}: the cache of transformers keeps {kept} tokens, but the attention window "
            f"is {window}, so results would depend on the chunking of the prompt"
        )
