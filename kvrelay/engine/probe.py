"""Finds out what a model's attention needs, by running it rather than by the names in its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvrelay.engine import attention
from kvrelay.errors import ModelRefused
from kvrelay.types import LayerKv

NAME = "kvrelay_probe"
DTYPES = ("float32", "bfloat16", "float16")  # that a model may attend in
MaskRule = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]  # batch, head, query, key -> is it seen

# Keywords that reach attention: the first are honoured, the second change nothing here.
HONOURED = {"scaling", "sliding_window", "softcap", "s_aux", "ragged_batch"}
HARMLESS = {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "output_hidden_states"}


@dataclass(frozen=True, slots=True)
class _Call:
    layer: int | None
    kv: LayerKv
    dtypes: set[str]
    mask: torch.Tensor | None
    kwargs: dict[str, Any]


def probe(model: PreTrainedModel, num_layers: int, max_len: int) -> tuple[tuple[LayerKv, ...], str]:
    """KV of each layer and the dtype of all, from one forward pass over two tokens.

    Raises ModelRefused unless each layer attends exactly once, under a rule that paged attention follows: causal,
    windowed or not, over all of max_len positions, without keywords that it does not know.
    """
    calls: list[_Call] = []
    rules: dict[int, MaskRule] = {}  # by id of the mask that stands for it
    masks: list[torch.Tensor] = []  # kept, so that ids stay unique

    def record_mask(*, q_length: int, kv_length: int, mask_function: MaskRule, **_: Any) -> torch.Tensor:
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
        kv = LayerKv(key.shape[1], key.shape[-1], value.shape[-1])
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in (query, key, value)}
        calls.append(_Call(getattr(module, "layer_idx", None), kv, dtypes, attention_mask, kwargs))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

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
        )
    model.set_attn_implementation(attention.NAME)

    kind = type(model).__name__
    if output.logits.shape[:2] != (1, 1):
        raise ModelRefused(f"{kind} computes logits of all tokens and cannot be asked for some")
    if [call.layer for call in calls] != list(range(num_layers)):
        raise ModelRefused(
            f"{kind} has {num_layers} layers, and attention ran in layers {[call.layer for call in calls]}: the others "
            "keep a state that is not a KV cache"
        )
    for call in calls:
        _check(f"{kind}, layer {call.layer}", call, rules, max_len)
    dtypes = set[str]().union(*(call.dtypes for call in calls))
    if len(dtypes) > 1 or not dtypes.issubset(DTYPES):
        raise ModelRefused(
            f"{kind} attends in {', '.join(sorted(dtypes))}; one of {', '.join(DTYPES)} all through is served"
        )
    return tuple(call.kv for call in calls), dtypes.pop()


def _check(where: str, call: _Call, rules: dict[int, MaskRule], max_len: int) -> None:
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
        raise ModelRefused(f"{where}: the model makes an attention mask of its own")
    window = call.kwargs.get("sliding_window") or max_len
    edges = {0, 1, window - 1, window, window + 1, max_len // 2, max_len - 1}
    queries = torch.tensor(sorted(q for q in edges if 0 <= q < max_len))[:, None]
    keys = torch.arange(max_len)[None, :]
    ours = (keys <= queries) & (keys > queries - window)
    if not torch.equal(torch.as_tensor(rule(0, 0, queries, keys)).expand_as(ours), ours):
        raise ModelRefused(f"{where}: the attention mask is neither causal nor a causal window of {window} tokens")
