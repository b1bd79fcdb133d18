"""Reference attention in plain matrix products, for options that no fused kernel has."""

from __future__ import annotations

import torch

# Bytes of float32 scores that are computed at a time.
SCORE_BYTES = 64 * 2**20


def explicit_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: torch.Tensor,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [..., Hkv, G, new, Dk], k [..., Hkv, S, Dk], v [..., Hkv, S, Dv] -> [..., Hkv, G, new, Dv].

    mask: bool, which keys each new token attends to, as [..., new, S] that broadcasts to the scores
    [..., Hkv, G, new, S]. softcap 0 is none; sinks [Hkv, G]. The softmax is in float32.
    """
    new, keys = q.shape[-2], k.shape[-2]
    step = max(1, SCORE_BYTES // (4 * q[..., 0, 0].numel() * keys))
    outs = []
    for start in range(0, new, step):
        rows = q[..., start : start + step, :]
        scores = (rows.flatten(-3, -2) @ k.mT).unflatten(-2, rows.shape[-3:-1]).float() * scale  # type: ignore[no-untyped-call]
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask[..., start : start + step, :], float("-inf"))
        if sinks is not None:
            column = sinks.float()[:, :, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(dim=-1)[..., :keys].to(v.dtype)
        outs.append((weights.flatten(-3, -2) @ v).unflatten(-2, rows.shape[-3:-1]))
    return torch.cat(outs, dim=-2)
