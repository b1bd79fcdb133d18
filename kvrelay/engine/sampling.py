"""From logits to tokens. A draw depends on the logits, the seed and the position, never on batch, worker or history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvrelay.types import SamplingParams, TokenLogprobs

# Stands for "never drawn". Finite, so that a row in which every token is banned is still a distribution.
BANNED = torch.finfo(torch.float32).min
NUCLEUS_GUESS = 1024  # tokens; where they hold top_p of the mass, the rest of the vocabulary need not be sorted


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The sequence so far, prompt first, and how to draw its next token."""

    params: SamplingParams
    token_ids: Sequence[int]
    prompt_len: int
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprobs: TokenLogprobs | None = None


def sample(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[Sampled]:
    """One token for each row of `logits` [N, V], of any float dtype.

    The steps are logit_bias, min_tokens, penalties, temperature, top_k, top_p, min_p, draw. Log-probabilities are the
    model's own: the log-softmax of the logits as they came in, before any of these steps.
    """
    logits = logits.float()
    likeliest: list[int] = logits.argmax(dim=-1).tolist()
    results = []
    for row, token_id, request in zip(logits, likeliest, requests, strict=True):
        if _changes_logits(request):
            row_logits = _adjusted(row, request)
            token_id = int(row_logits.argmax())
        else:
            row_logits = row
        if request.params.temperature > 0:
            token_id = _draw(row_logits, request)
        results.append(Sampled(token_id, _logprobs(row, token_id, request.params.logprobs)))
    return results


def _changes_logits(request: SampleRequest) -> bool:
    params = request.params
    return bool(
        params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or request.num_output < params.min_tokens
    )


def _adjusted(logits: torch.Tensor, request: SampleRequest) -> torch.Tensor:
    """A copy of one row [V] with bias, bans and penalties applied.

    repetition_penalty divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al.,
    CTRL, 2019); frequency_penalty is subtracted once per occurrence in the output, presence_penalty once if any.
    """
    params = request.params
    logits = logits.clone()
    if params.logit_bias:
        tokens, bias = zip(*params.logit_bias, strict=True)
        logits.index_add_(0, _ids(tokens, logits), torch.tensor(bias, dtype=logits.dtype, device=logits.device))
    if request.num_output < params.min_tokens:
        stops = request.eos_token_ids.union(params.stop_token_ids)
        logits[_ids([token for token in stops if 0 <= token < len(logits)], logits)] = BANNED
    if params.repetition_penalty != 1:
        seen = _ids(request.token_ids, logits)
        values = logits[seen]
        penalised = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        logits[seen] = penalised.clamp(min=BANNED)  # a banned token times the penalty would be infinite
    if params.presence_penalty or params.frequency_penalty:
        counts = torch.bincount(_ids(request.token_ids[request.prompt_len :], logits), minlength=len(logits))
        logits -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
    return logits


def _draw(logits: torch.Tensor, request: SampleRequest) -> int:
    """Inverse transform sampling over the tokens in the order of their ids.

    That order, unlike the order of probabilities, does not change with rounding errors: two workers whose logits
    differ by an ulp draw the same token except where the uniform number falls within an ulp of a boundary.
    """
    cumulative = _weights(logits, request.params).double().cpu().numpy().cumsum()
    index = np.searchsorted(cumulative, _uniform(request) * cumulative[-1], side="right")
    last = np.searchsorted(cumulative, cumulative[-1])  # of those with weight; rounding may reach past it
    return int(min(index, last))


def _weights(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Unnormalised probabilities [V], 1 for the largest, 0 for what top_k, top_p and min_p take away, in this order.

    top_p keeps the likeliest tokens up to the one with which their mass reaches top_p (Holtzman et al., 2020); min_p
    those at least min_p times as likely as the likeliest (Nguyen et al., 2024).
    """
    weights = ((logits - logits.max()) / params.temperature).exp()
    if 0 < params.top_k < len(weights):
        weights = _only(weights, *weights.topk(params.top_k))
    if params.top_p < 1:
        weights = _nucleus(weights, params.top_p)
    if params.min_p > 0:
        weights[weights < params.min_p] = 0
    return weights


def _nucleus(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    mass = top_p * weights.sum(dtype=torch.float64)
    for size in (NUCLEUS_GUESS, len(weights)):
        values, tokens = weights.topk(min(size, len(weights)))
        cumulative = values.cumsum(0, dtype=torch.float64)
        if cumulative[-1] >= mass:
            break
    kept = 1 + int((cumulative[:-1] < mass).sum())
    return _only(weights, values[:kept], tokens[:kept])


def _only(weights: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(weights).scatter_(0, tokens, values)


def _uniform(request: SampleRequest) -> float:
    """A number in [0, 1) from the counter-based generator Philox4x64 (Salmon et al., 2011) at (seed, position)."""
    seed = request.params.seed
    assert seed is not None, "a request that draws carries a seed"
    generator = np.random.Philox(key=seed % 2**64, counter=len(request.token_ids))
    return float(generator.random_raw() >> 11) * 2.0**-53


def _logprobs(logits: torch.Tensor, token_id: int, top: int | None) -> TokenLogprobs | None:
    if top is None:
        return None
    logprobs = logits.log_softmax(dim=-1)
    values, tokens = logprobs.topk(min(top, len(logprobs)))
    return TokenLogprobs(float(logprobs[token_id]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))


def _ids(token_ids: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(token_ids, dtype=torch.long, device=like.device)
