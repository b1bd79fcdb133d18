"""Changes to a request's logits before sampling, for a whole batch at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvrelay.engine.base.device import to_device

if TYPE_CHECKING:
    from kvrelay.engine.sampling.sampler import SampleRequest

# Logit of a banned token. Finite, so that a row in which every token is banned is still a
# distribution.
BANNED = torch.finfo(torch.float32).min


def adjusted(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """Logits [R, V] float32 with bias, bans and penalties applied, in this order. The input is not
    modified.

    repetition_penalty divides positive and multiplies negative logits of tokens in prompt or output
    (Keskar et al., CTRL, 2019). frequency_penalty is subtracted once per occurrence in the output,
    presence_penalty once if the token occurs in the output.
    """
    rows = [row for row, request in enumerate(requests) if _changes_logits(request)]
    if not rows:
        return logits
    index = to_device(rows, np.int64, logits.device)
    changed = logits[index]
    changing = [requests[row] for row in rows]
    _bias(changed, changing)
    _ban(changed, changing)
    _penalise_repetition(changed, changing)
    _penalise_output(changed, changing)
    return changed if len(rows) == len(requests) else logits.index_copy(0, index, changed)


def _changes_logits(request: SampleRequest) -> bool:
    params = request.params
    return bool(
        params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or request.num_output < params.min_tokens
    )


def _bias(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> None:
    chosen = {
        row: request.params.logit_bias
        for row, request in enumerate(requests)
        if request.params.logit_bias
    }
    if chosen:
        places = _places(
            logits, {row: [token for token, _ in bias] for row, bias in chosen.items()}
        )
        amounts = [amount for bias in chosen.values() for _, amount in bias]
        logits.view(-1).index_add_(0, places, to_device(amounts, np.float32, logits.device))


def _ban(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> None:
    """Bans the tokens that end an answer before min_tokens."""
    vocab_size = logits.shape[1]
    stops = {
        row: [
            t
            for t in request.eos_token_ids.union(request.params.stop_token_ids)
            if 0 <= t < vocab_size
        ]
        for row, request in enumerate(requests)
        if request.num_output < request.params.min_tokens
    }
    if stops:
        places = _places(logits, stops)
        values = logits.view(-1)[places]
        # A NaN stays NaN, so that the row fails instead of continuing without that token.
        logits.view(-1)[places] = torch.where(values.isfinite(), BANNED, values)


def _penalise_repetition(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> None:
    seen = {
        row: request.token_ids
        for row, request in enumerate(requests)
        if request.params.repetition_penalty != 1
    }
    if seen:
        # A repeated token gets the same value each time.
        places = _places(logits, seen)
        penalty = _for_each(seen, [requests[row].params.repetition_penalty for row in seen], logits)
        values = logits.view(-1)[places]
        penalised = torch.where(values > 0, values / penalty, values * penalty)
        # Without the clamp, a banned token times the penalty, or a large logit divided by a small
        # penalty, would be infinite.
        logits.view(-1)[places] = torch.where(
            values.isfinite(), penalised.clamp(BANNED, -BANNED), penalised
        )


def _penalise_output(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> None:
    output = {
        row: request.token_ids[request.prompt_len :]
        for row, request in enumerate(requests)
        if request.params.presence_penalty or request.params.frequency_penalty
    }
    if output:
        places = _places(logits, output)
        presence = _for_each(
            output, [requests[row].params.presence_penalty for row in output], logits
        )
        frequency = _for_each(
            output, [requests[row].params.frequency_penalty for row in output], logits
        )
        counts = torch.zeros_like(logits).view(-1)
        counts.scatter_add_(0, places, torch.ones_like(presence))
        # A repeated place gets the same value each time.
        logits.view(-1)[places] = logits.view(-1)[places] - (presence + frequency * counts[places])


def _places(logits: torch.Tensor, tokens: Mapping[int, Sequence[int]]) -> torch.Tensor:
    """Indices of each row's tokens in the flattened logits, row after row: [N] int64."""
    width = logits.shape[1]
    places = [
        row * width + np.asarray(token_ids, dtype=np.int64) for row, token_ids in tokens.items()
    ]
    return to_device(np.concatenate(places), np.int64, logits.device)


def _for_each(
    tokens: Mapping[int, Sequence[int]], values: list[float], logits: torch.Tensor
) -> torch.Tensor:
    """One value per row, repeated for each of the row's tokens: [N] float32."""
    repeated = np.repeat(
        np.asarray(values, dtype=np.float32), [len(token_ids) for token_ids in tokens.values()]
    )
    return to_device(repeated, np.float32, logits.device)
