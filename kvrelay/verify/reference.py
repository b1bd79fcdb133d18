"""The reference answers of transformers' own `generate`: one process, one request at a time, no
kvrelay code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from kvrelay.verify.cases import Case

TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Reference:
    """The model, loaded by transformers alone."""

    def __init__(self, path: str, dtype: str) -> None:
        disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=TORCH_DTYPE[dtype]
        ).eval()

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the model's vocabulary."""
        return int(self._model.config.vocab_size)

    @torch.inference_mode()
    def greedy(self, cases: list[Case], done: Callable[[], None]) -> dict[str, tuple[int, ...]]:
        """Returns the token ids of the greedy cases' answers, by case name. Calls `done` after each
        case.
        """
        answers = {}
        for case in cases:
            prompt = torch.tensor([case.token_ids])
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=case.options["max_tokens"],
                do_sample=False,
                # A single sequence is never padded.
                pad_token_id=0,
            )
            answers[case.name] = tuple(output[0, len(case.token_ids) :].tolist())
            done()
        return answers

    @torch.inference_mode()
    def margin(self, case: Case, prefix: tuple[int, ...], ours: int, theirs: int) -> float:
        """Returns the difference between the logits of two next tokens after the prompt and
        `prefix`.
        """
        logits = self._model(torch.tensor([case.token_ids + prefix])).logits[0, -1].float()
        return float((logits[theirs] - logits[ours]).abs())
