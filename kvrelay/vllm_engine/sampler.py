"""Draws vLLM's tokens with kvrelay's sampler, so that a sample depends on the logits, the seed and
the position only.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from kvrelay.engine.sampling.sampler import Sampled, SampleRequest, sample
from kvrelay.vllm_engine.exchange import EXCHANGE, KEY, Exchanged


class KeyedSampler(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that leaves one token for vLLM's greedy sampling to choose.

    vLLM calls it for all rows of a step, including those of prompts that are not complete, whose
    draws vLLM drops. vLLM's own requests are left alone.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        # Row of the batch -> name of the sequence.
        self._rows: dict[int, str] = {}

    def is_argmax_invariant(self) -> bool:
        """False: the token with the largest logit changes."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the sequences' rows."""
        process_dict_updates(
            self._rows, batch_update, lambda params, *_: (params.extra_args or {}).get(KEY)
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Draws a token for each row, and makes it the row's only candidate."""
        found = [(row, EXCHANGE.sequences.get(name)) for row, name in self._rows.items()]
        live = [(row, one) for row, one in found if one is not None and row < len(logits)]
        if not live:
            return logits
        rows = torch.tensor([row for row, _ in live], device=logits.device)
        draws = sample(logits[rows], [_request(one) for _, one in live])
        tokens = []
        for (_, one), drawn in zip(live, draws, strict=True):
            one.drawn = drawn
            # A row without a token is reported as failed, and any token will do.
            tokens.append(drawn.token_id if isinstance(drawn, Sampled) else 0)
        logits[rows] = float("-inf")
        logits[rows, torch.tensor(tokens, device=logits.device)] = 0.0
        return logits


def _request(one: Exchanged) -> SampleRequest:
    sequence = one.sequence
    return SampleRequest(
        params=sequence.spec.sampling,
        token_ids=sequence.tokens,
        prompt_len=sequence.spec.prompt_len,
        eos_token_ids=one.eos_token_ids,
        matcher=sequence.matcher,
        thinking=sequence.thinking,
    )
