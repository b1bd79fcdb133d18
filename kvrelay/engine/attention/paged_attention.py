"""Attention over paged KV, which replaces the attention of any transformers model."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from kvrelay.engine.attention.latent_attention import absorbed

NAME = "kvrelay_paged"

# The batch of the forward pass on this thread, for models that drop keyword arguments.
_carried = threading.local()


class Batch(Protocol):
    """A forward pass over T new tokens of several sequences, as the attention of each layer uses
    it.
    """

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Stores the new keys and values, then attends.

        query [1, Hq, T, Dk], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv] -> [1, T, Hq, Dv]; sinks
        [Hq]. window 0 is unbounded; softcap 0 is none.
        """
        ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    *,
    ragged_batch: Batch | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Stores the new keys and values, then attends from each new token to its own sequence.

    query [1, Hq, T, Dk], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv] -> [1, T, Hq, Dv]. Attention is
    causal, over the last `sliding_window` tokens if that is given. softcap c: scores become
    c·tanh(scores / c). s_aux [Hq]: an additional score per head that takes part in the softmax and
    carries no value.

    A layer with absorbed matrices passes latent vectors as key and value; see `latent_attention`.
    """
    index: int = module.layer_idx  # type: ignore[assignment]
    batch: Batch = _carried.batch if ragged_batch is None else ragged_batch
    latent = absorbed(module)
    out = batch.attend(
        index,
        query if latent is None else latent.query(query),
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out if latent is None else latent.output(out), None


def carry_batch(model: PreTrainedModel) -> None:
    """Makes the batch reach the attention of a model that does not pass keyword arguments on to
    it.
    """

    def keep(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        _carried.batch = kwargs.get("ragged_batch")

    model.register_forward_pre_hook(keep, with_kwargs=True)


AttentionInterface.register(NAME, paged_attention)
