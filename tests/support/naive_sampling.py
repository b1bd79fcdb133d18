"""Sampling row by row, as it is defined: the oracle for the engine's, which takes the whole batch
at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvrelay.engine.sampling.sampler import Sampled, SampleRequest
from kvrelay.types.requests import SamplingParams, TokenLogprobs

BANNED = torch.finfo(torch.float32).min


def naive_sample(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[Sampled]:
    return [
        _one(row.clone(), request) for row, request in zip(logits.float(), requests, strict=True)
    ]


def _one(row: torch.Tensor, request: SampleRequest) -> Sampled:
    scores = _adjusted(row.clone(), request)
    token_id = _draw(scores, request) if request.params.temperature > 0 else int(scores.argmax())
    if request.params.logprobs is None:
        return Sampled(token_id)
    logprobs = row.log_softmax(dim=-1)
    values, tokens = logprobs.topk(min(request.params.logprobs, len(logprobs)))
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return Sampled(token_id, TokenLogprobs(float(logprobs[token_id]), top))


def _adjusted(logits: torch.Tensor, request: SampleRequest) -> torch.Tensor:
    params = request.params
    for token, bias in params.logit_bias:
        logits[token] += bias
    if request.num_output < params.min_tokens:
        stops = request.eos_token_ids.union(params.stop_token_ids)
        logits[[token for token in stops if 0 <= token < len(logits)]] = BANNED
    if params.repetition_penalty != 1:
        seen = sorted(set(request.token_ids))
        values = logits[seen]
        penalised = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
        logits[seen] = penalised.clamp(min=BANNED)
    output = torch.tensor(list(request.token_ids[request.prompt_len :]), dtype=torch.long)
    counts = torch.bincount(output, minlength=len(logits))
    return logits - (params.presence_penalty * (counts > 0) + params.frequency_penalty * counts)


def _draw(logits: torch.Tensor, request: SampleRequest) -> int:
    cumulative = _weights(logits, request.params).double().numpy().cumsum()
    index = np.searchsorted(cumulative, _uniform(request) * cumulative[-1], side="right")
    last = np.searchsorted(cumulative, cumulative[-1])
    return int(min(index, last))


def _weights(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    weights = ((logits - logits.max()) / params.temperature).exp()
    values, tokens = weights.sort(descending=True, stable=True)
    kept = params.top_k if 0 < params.top_k < len(weights) else len(weights)
    if params.top_p < 1:
        cumulative = values[:kept].cumsum(0, dtype=torch.float64)
        mass = params.top_p * values[:kept].sum(dtype=torch.float64)
        kept = 1 + int((cumulative[:-1] < mass).sum())
    weights[tokens[kept:]] = 0
    weights[weights < params.min_p] = 0
    return weights


def _uniform(request: SampleRequest) -> float:
    assert request.params.seed is not None
    generator = np.random.Philox(key=request.params.seed % 2**64, counter=len(request.token_ids))
    return float(generator.random_raw() >> 11) * 2.0**-53
