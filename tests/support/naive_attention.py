"""The definition of attention, written out for one query, one head, one token at a time."""

from __future__ import annotations

import math

import torch


def naive(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    past: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """queries [new, Hq, Dk], keys [end, Hkv, Dk], values [end, Hkv, Dv] -> [new, Hq, Dv], in
    float64.
    """
    new, heads, _ = queries.shape
    out = torch.zeros(new, heads, values.shape[-1], dtype=torch.float64)
    group = heads // keys.shape[1]
    for i in range(new):
        for head in range(heads):
            seen = [j for j in range(past + i + 1) if window is None or past + i - j < window]
            scores = [
                float(queries[i, head].double() @ keys[j, head // group].double()) * scale
                for j in seen
            ]
            if softcap is not None:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            weights = [math.exp(score) for score in scores]
            total = sum(weights) + (0 if sinks is None else math.exp(float(sinks[head])))
            for weight, j in zip(weights, seen, strict=True):
                out[i, head] += weight / total * values[j, head // group].double()
    return out
