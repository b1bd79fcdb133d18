"""Multi-head latent attention (MLA) over latent vectors: DeepSeek-V2 (2024), section 2.1.

MLA computes K and V of all heads from one latent vector c of a token: k = A·c and v = B·c, with
matrices A and B of each head. A score is q·(A·c) = (Aᵀ·q)·c, and the output is the sum of
p·(B·c) = B·(sum of p·c). So with A in the query and B in the output, attention needs c alone, which
is the KV of one head. The part of K with positions is the same for all heads and follows c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

# K and V of [1, Hkv, T, D] each.
Expand = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
_NAME = "absorbed"


class Absorbed(nn.Module):
    """The matrices of a layer, for H heads: A [H, Dk, rank] and B [H, rank, Dv]."""

    a: torch.Tensor
    b: torch.Tensor

    def __init__(self, attention: Any) -> None:
        """attention: a layer of transformers that expands latent vectors by `kv_b_proj`."""
        super().__init__()
        self.k_dim: int = attention.qk_nope_head_dim
        weight: torch.Tensor = attention.kv_b_proj.weight.detach()
        heads = weight.view(-1, self.k_dim + attention.v_head_dim, weight.shape[-1])
        k, v = heads[:, : self.k_dim], heads[:, self.k_dim :]
        self.register_buffer("a", k.contiguous(), persistent=False)
        self.register_buffer("b", v.transpose(1, 2).contiguous(), persistent=False)

    def query(self, query: torch.Tensor) -> torch.Tensor:
        """[1, H, T, Dk + Dr] -> [1, H, T, rank + Dr], where Dr is the part with positions."""
        plain, turned = query[..., : self.k_dim], query[..., self.k_dim :]
        return torch.cat((plain @ self.a, turned), dim=-1)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """[1, T, H, rank] -> [1, T, H, Dv]."""
        return (attended.transpose(1, 2) @ self.b).transpose(1, 2)


def absorbed(attention: nn.Module) -> Absorbed | None:
    """Returns the absorbed matrices of a layer, or None if the layer attends to K and V."""
    return getattr(attention, _NAME, None)


def absorb(model: PreTrainedModel, ours: frozenset[str]) -> bool:
    """Makes the layers with latent attention pass latent vectors to the attention functions named
    in `ours`. Returns whether there are any. Other attention functions still get K and V, until
    `forget_expansion`.
    """
    found = [module for module in model.modules() if _is_latent(module)]
    for attention in found:
        setattr(attention, _NAME, Absorbed(attention))
        attention.expand_kv = _latent_or(attention, attention.expand_kv, ours)
    return bool(found)


def undo(model: PreTrainedModel) -> None:
    """Makes all layers pass K and V again."""
    for attention in model.modules():
        if absorbed(attention) is not None:
            delattr(attention, _NAME)
            # The method of the class.
            del attention.expand_kv


def forget_expansion(model: PreTrainedModel) -> None:
    """Drops the matrices that are absorbed."""
    for attention in model.modules():
        if absorbed(attention) is not None:
            attention.kv_b_proj = None


def _is_latent(module: Any) -> bool:
    expansion = getattr(module, "kv_b_proj", None)
    return (
        hasattr(module, "expand_kv")
        and type(expansion) is nn.Linear
        and expansion.bias is None
        and expansion.in_features == getattr(module, "kv_lora_rank", None)
    )


def _latent_or(attention: Any, expand: Expand, ours: frozenset[str]) -> Expand:
    """Returns what replaces `expand_kv`. latent [1, 1, T, rank], positions [1, 1, T, Dr]."""

    def expand_kv(
        latent: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if attention.config._attn_implementation not in ours:
            return expand(latent, positions)
        return torch.cat((latent, positions), dim=-1), latent

    return expand_kv
