"""Categorical sampling for a batch, by inverse transform sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvrelay.engine.base.device import to_device
from kvrelay.engine.sampling.philox import uniform
from kvrelay.engine.sampling.radix_select import last_kept
from kvrelay.types.requests import SamplingParams

if TYPE_CHECKING:
    from kvrelay.engine.sampling.sampler import SampleRequest

# Size in tokens of the partial sort on a CPU. Enough if it holds all tokens that top_k and top_p
# keep.
LIKELIEST_GUESS = 64
# Stands for a token id in a row whose logits are no distribution.
NOT_DRAWN = -1
# Logits that a CPU processes at a time, so that they stay in its cache.
CACHED_ELEMENTS = 2**16


def is_cut(params: SamplingParams, vocab_size: int) -> bool:
    """True if top_k or top_p removes tokens."""
    return 0 < params.top_k < vocab_size or params.top_p < 1


def draw(
    logits: torch.Tensor, rows: Sequence[int], requests: Sequence[SampleRequest], cut: bool
) -> torch.Tensor:
    """Samples token ids [S], one for each of the given rows of `logits` [R, V]. `cut` is the value
    of `is_cut` for all of them.

    NOT_DRAWN for a row with a NaN or without a finite maximum. No row depends on another.
    """
    vocab_size = logits.shape[1]
    options = [request.params for request in requests]
    assert all(params.seed is not None for params in options), "a request that draws carries a seed"
    uniforms = uniform(
        [params.seed or 0 for params in options], [len(request.token_ids) for request in requests]
    )
    top_k = [min(params.top_k or vocab_size, vocab_size) for params in options]
    table = [
        (params.temperature, k, params.top_p, params.min_p)
        for params, k in zip(options, top_k, strict=True)
    ]
    columns = to_device(np.column_stack((table, uniforms)), np.float64, logits.device)[:, :, None]
    index = to_device(rows, np.int64, logits.device)
    on_cpu = logits.device.type == "cpu"
    step = max(1, CACHED_ELEMENTS // vocab_size) if on_cpu else len(rows)
    tokens = []
    for part, values in zip(torch.split(index, step), torch.split(columns, step), strict=True):
        temperature, k, top_p, min_p, numbers = values.unbind(1)
        # Unnormalised probabilities; the likeliest token has 1.
        weights = logits[part]
        weights.sub_(weights.amax(dim=1, keepdim=True)).div_(temperature.float()).exp_()
        if cut:
            keys = _keys(weights)
            weights.masked_fill_(keys < _least_key(keys, weights, k.long(), top_p), 0)
        if any(params.min_p for params in options):
            weights.masked_fill_(weights < min_p.float(), 0)
        tokens.append(_choice(weights, numbers))
    return torch.cat(tokens)


def _keys(weights: torch.Tensor) -> torch.Tensor:
    """Integer keys [S, V] in the order of the weights. Of two equal weights, the lower token id has
    the larger key.
    """
    ids = torch.arange(weights.shape[1] - 1, -1, -1, device=weights.device)
    # Non-negative floats have the same order as their bit patterns.
    return weights.view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(ids)


def _least_key(
    keys: torch.Tensor, weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Keys [S, 1] of the last tokens that are kept, for weights [S, V], top_k and top_p [S, 1].

    top_k keeps that many tokens. top_p keeps the likeliest of these until their mass reaches top_p
    (Holtzman et al., 2020). On a CPU, sorts the likeliest tokens alone, and selects in the rows
    where these are not enough. On a GPU, sorts all, because the host would have to wait for the GPU
    to learn whether they are enough.
    """
    vocab_size = weights.shape[1]
    size = min(LIKELIEST_GUESS, vocab_size) if weights.device.type == "cpu" else vocab_size
    largest = keys.topk(size).values
    cumulative = (largest >> 32).int().view(torch.float32).cumsum(1, dtype=torch.float64)
    limited = top_k < vocab_size
    of_top_k = cumulative.gather(1, top_k.clamp(max=size) - 1)
    of_all = weights.sum(1, keepdim=True, dtype=torch.float64)
    mass = torch.where(top_p < 1, top_p * torch.where(limited, of_top_k, of_all), torch.inf)
    kept = torch.minimum(1 + (cumulative[:, :-1] < mass).sum(1, keepdim=True), top_k)
    least = largest.gather(1, kept.clamp_(max=size) - 1)
    if size < vocab_size:
        enough = torch.where(limited, top_k <= size, cumulative[:, -1:] >= mass)
        more = (of_all.isfinite() & ~enough)[:, 0]
        if more.any():
            least[more] = _selected(keys[more], weights[more], top_k[more], top_p[more])
    return least


def _selected(
    keys: torch.Tensor, weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Does what `_least_key` does, on a CPU, in a time that no distribution makes long."""
    values = weights
    if bool((top_k < weights.shape[1]).any()):
        ones = np.ones(weights.shape, np.float32)
        last = last_kept(keys.numpy(), ones, top_k[:, 0].double().numpy())
        values = weights.masked_fill(keys < torch.from_numpy(last)[:, None], 0)
    total = values.sum(1, keepdim=True, dtype=torch.float64)
    mass = torch.where(top_p < 1, top_p * total, torch.inf)[:, 0]
    return torch.from_numpy(last_kept(keys.numpy(), values.numpy(), mass.numpy()))[:, None]


def _choice(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Indices [S] by inverse transform sampling over weights [S, N] in the order of token ids.
    NOT_DRAWN where the weights do not add up to a positive finite number.

    Unlike the order of probabilities, the order of ids does not change with rounding errors: two
    workers whose logits differ by an ulp sample the same token except where the uniform number
    falls within an ulp of a boundary.
    """
    cumulative = weights.cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, uniforms * total, right=True)
    # The last token with a positive weight; rounding may make `index` exceed it.
    last = torch.searchsorted(cumulative, total)
    # Among NaNs the search ends past the last token.
    drawable = total.isfinite() & (total > 0)
    return torch.where(drawable, torch.minimum(index, last), NOT_DRAWN)[:, 0]
