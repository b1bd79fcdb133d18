"""From logits to tokens. A sample depends on the logits, the seed and the position, never on batch,
worker or history.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.base.device import to_device
from kvrelay.engine.sampling.categorical import NOT_DRAWN, draw, is_cut
from kvrelay.engine.sampling.matcher import Matcher
from kvrelay.engine.sampling.penalties import adjusted
from kvrelay.engine.sampling.sequence_faults import SequenceFault
from kvrelay.engine.sampling.thinking import ThinkingBudget
from kvrelay.engine.sampling.token_masks import TokenMasks, token_masks
from kvrelay.errors import Internal, InvalidArgument, KvRelayError
from kvrelay.sampling_limits import LEAST_TEMPERATURE, check_params
from kvrelay.types.requests import SamplingParams, TokenLogprobs

# OpenAI's number for a very unlikely token. The logarithm of zero is infinite, and JSON has no
# infinity.
LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The sequence so far, prompt first, and the parameters for sampling its next token."""

    params: SamplingParams
    token_ids: Sequence[int]
    prompt_len: int
    eos_token_ids: frozenset[int] = frozenset()
    # The state of params.guidance, from the grammars of the model.
    matcher: Matcher | None = None
    # The state of params.thinking_token_budget.
    thinking: ThinkingBudget | None = None

    @property
    def num_output(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids) - self.prompt_len


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token, with log-probabilities if the request asks for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


def sample(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[Sampled | KvRelayError]:
    """Samples one token for each row of `logits` [R, V], of any float dtype.

    The steps are logit_bias, min_tokens, penalties, guidance, temperature, top_k, top_p, min_p and
    sampling. Where a thinking budget is spent, the end of the thinking takes the sample's place.
    Log-probabilities are the model's own: the log-softmax of the input logits, before any of these
    steps, and at least LEAST_LOGPROB. A row's result does not depend on the others. On a GPU the
    host waits once, for the results.

    A row that cannot be sampled has an error in place of its token, and does not affect the others:
    InvalidArgument for sampling parameters that are not allowed and for guidance that allows no
    token, SequenceFault for logits with a NaN or without a finite maximum. Token ids are from 0 to
    V - 1.
    """
    logits = logits.float()
    flaws: dict[int, KvRelayError] = {
        row: flaw
        for row, request in enumerate(requests)
        if (flaw := _flaw(request, logits.shape[1]))
    }
    if flaws:
        requests = [
            _without_options(request) if row in flaws else request
            for row, request in enumerate(requests)
        ]
    masks = token_masks(requests)
    if masks is not None:
        flaws |= masks.failed
    tokens = _tokens(logits, requests, masks)
    if all(request.params.logprobs is None for request in requests):
        sampled = [Sampled(token_id) for token_id in tokens.tolist()]
    else:
        sampled = _with_logprobs(tokens, logits, requests)
    return [
        flaws.get(row) or _checked(result, logits.shape[1]) for row, result in enumerate(sampled)
    ]


def score(
    logits: torch.Tensor, targets: npt.NDArray[np.int64], count: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns the log-probabilities of the targets [R], and the `count` likeliest tokens with their
    log-probabilities [R, count], for logits [R, V] of any float dtype.

    Raises SequenceFault for logits that are no distribution.
    """
    logprobs = logits.float().log_softmax(dim=-1).clamp_(min=LEAST_LOGPROB)
    index = to_device(targets, np.int64, logits.device)
    own = logprobs.gather(1, index[:, None])[:, 0].cpu().numpy()
    if not np.isfinite(own).all():
        raise SequenceFault("the model's logits for a token of the prompt hold NaN or infinity")
    top, ids = logprobs.topk(count)
    return own, ids.cpu().numpy(), top.cpu().numpy()


def _flaw(request: SampleRequest, vocab_size: int) -> KvRelayError | None:
    try:
        check_params(request.params, vocab_size)
    except InvalidArgument as flaw:
        return flaw
    if request.params.guidance is not None and request.matcher is None:
        return Internal("a request with guidance was sampled without its matcher")
    return None


def _without_options(request: SampleRequest) -> SampleRequest:
    return SampleRequest(SamplingParams(temperature=0), request.token_ids, request.prompt_len)


def _checked(sampled: Sampled, vocab_size: int) -> Sampled | KvRelayError:
    drawn = 0 <= sampled.token_id < vocab_size
    if drawn and (sampled.logprobs is None or isfinite(sampled.logprobs.logprob)):
        return sampled
    return SequenceFault(
        "the model's logits for the next token are no distribution: they hold NaN or infinity"
    )


def _tokens(
    logits: torch.Tensor, requests: Sequence[SampleRequest], masks: TokenMasks | None
) -> torch.Tensor:
    """Token ids [R] for float32 logits [R, V], with NOT_DRAWN for each row that has none."""
    scores = adjusted(logits, requests)
    if masks is not None:
        scores = masks.applied(scores)
    tokens = _argmax(scores)
    drawing = [
        row
        for row, request in enumerate(requests)
        if request.params.temperature >= LEAST_TEMPERATURE
    ]
    for cut in (False, True):
        rows = [row for row in drawing if is_cut(requests[row].params, logits.shape[1]) is cut]
        if rows:
            drawn = draw(scores, rows, [requests[row] for row in rows], cut)
            tokens[to_device(rows, np.int64, logits.device)] = drawn
    for row, token_id in _due_tokens(requests):
        # A row without a distribution keeps its error.
        tokens[row] = torch.where(tokens[row] == NOT_DRAWN, tokens[row], token_id)
    return tokens


def _due_tokens(requests: Sequence[SampleRequest]) -> Iterator[tuple[int, int]]:
    """Yields each row whose thinking budget is spent, with the token that ends the thinking.

    Adjacent requests with the same budget are one sequence with 0, 1, 2, … drafts.
    """
    if all(request.thinking is None for request in requests):
        return
    for thinking, group in groupby(enumerate(requests), key=lambda one: one[1].thinking):
        if thinking is not None:
            rows, drafts = zip(*group, strict=True)
            due = thinking.next_tokens(drafts[-1].token_ids, len(rows) - 1)
            for row, token_id in zip(rows, due, strict=True):
                if token_id is not None:
                    yield row, token_id


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Indices [R] of the largest of logits [R, V], NOT_DRAWN if it is not finite. NaN counts as the
    largest.
    """
    # On a CPU, numpy's argmax is ten times as fast as torch's.
    index = (
        torch.from_numpy(logits.numpy().argmax(axis=-1))
        if logits.device.type == "cpu"
        else logits.argmax(dim=-1)
    )
    return torch.where(logits.gather(1, index[:, None])[:, 0].isfinite(), index, NOT_DRAWN)


def _with_logprobs(
    tokens: torch.Tensor, logits: torch.Tensor, requests: Sequence[SampleRequest]
) -> list[Sampled]:
    """Adds log-probabilities where they are requested. All results leave the device in one
    tensor.
    """
    # Number of likeliest tokens requested -> rows.
    asked: dict[int, list[int]] = {}
    for row, request in enumerate(requests):
        if request.params.logprobs is not None:
            asked.setdefault(min(request.params.logprobs, logits.shape[1]), []).append(row)
    results = [tokens]
    for top, rows in asked.items():
        index = to_device(rows, np.int64, logits.device)
        # NaN stays NaN.
        logprobs = logits[index].log_softmax(dim=-1).clamp_(min=LEAST_LOGPROB)
        results += [logprobs.gather(1, tokens[index, None].clamp(min=0)), *logprobs.topk(top)]
    # float64 represents token ids exactly.
    numbers = iter(torch.cat([result.flatten().double() for result in results]).tolist())
    token_ids = [int(token_id) for token_id in islice(numbers, len(requests))]
    found: dict[int, TokenLogprobs] = {}
    for top, rows in asked.items():
        own, values, ids = (list(islice(numbers, len(rows) * n)) for n in (1, top, top))
        pairs = list(zip(map(int, ids), values, strict=True))
        for i, row in enumerate(rows):
            found[row] = TokenLogprobs(own[i], tuple(pairs[i * top : (i + 1) * top]))
    return [Sampled(token_id, found.get(row)) for row, token_id in enumerate(token_ids)]
