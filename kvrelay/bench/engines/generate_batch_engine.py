"""The continuous batching of transformers, `generate_batch`, as it chooses its own attention and
graphs here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvrelay.bench.engines.loop import serve

BLOCK_TOKENS = 256  # its own default


class GenerateBatch:
    """It takes whole requests only, so a batch is prefilled anew for each measurement, and what is
    counted is read from the times at which its tokens came."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import transformers
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        from kvrelay.bench.shapes import random_model
        from kvrelay.engine.base.device import find_device

        device = str(find_device(settings["device"]))
        torch.set_num_threads(settings["threads"])
        if settings["shape"] is not None:
            self._model = random_model(settings["shape"], device)
        else:
            self._model = AutoModelForCausalLM.from_pretrained(
                settings["model"], dtype=settings["dtype"]
            ).to(device)
        self._version = transformers.__version__
        self._attention: str = self._model.config._attn_implementation
        self._step_tokens: int = max(settings["chunk_tokens"], 2 * settings["most_batch"])
        self._generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._config = ContinuousBatchingConfig(
            # The rest of the memory
            num_blocks=settings["kv_tokens"] // BLOCK_TOKENS + 2 * settings["most_batch"],
            max_batch_tokens=self._step_tokens,  # is not its own
            max_requests_per_batch=settings["most_batch"],
            allow_block_sharing=False,  # prompts are new
        )
        self._batch: list[list[int]] = []

    def facts(self) -> dict[str, Any]:
        name = f"transformers {self._version} generate_batch"
        return {"name": name, "chunk_tokens": self._step_tokens, "attention": self._attention}

    def prefill(self, prompt: list[int]) -> float:
        """From when its scheduler begins with the prompt, which is when ours would."""
        (result,) = self._generate([prompt], 1)
        return float(result.timestamps[0] - result.lifespan[0])

    def open(self, prompts: list[list[int]]) -> None:
        self._batch = prompts

    def decode(self, steps: int) -> float:
        """Of the sequence that begins last: all others decode beside it until it is done."""
        prompt_tokens = sum(map(len, self._batch))
        ahead = math.ceil(prompt_tokens / (self._step_tokens - len(self._batch))) + len(self._batch)
        results = self._generate(self._batch, 1 + steps + ahead)
        last = max(results, key=lambda result: result.timestamps[0])
        began, ended = last.timestamps[0], last.timestamps[steps]
        assert all(result.timestamps[-1] >= ended for result in results), (
            "a step is a token for each sequence"
        )
        # The sequences grow, as other engines' do.
        grown = zip(self._batch, results, strict=True)
        self._batch = [[*prompt, *result.generated_tokens[:steps]] for prompt, result in grown]
        return float(ended - began)

    def close(self) -> None:
        self._batch = []

    def _generate(self, prompts: list[list[int]], max_new_tokens: int) -> Sequence[Any]:
        """In the order of the prompts."""
        results = list(
            self._model.generate_batch(
                prompts,
                generation_config=self._generation,
                continuous_batching_config=self._config,
                record_timestamps=True,
                persistent_manager=True,
                max_new_tokens=max_new_tokens,
            ).values()
        )
        if len(results) < len(prompts):
            raise RuntimeError(
                f"generate_batch answered {len(results)} of {len(prompts)} "
                f"requests; its log says why"
            )
        for result in results:
            if result.error is not None:
                raise RuntimeError(f"generate_batch failed: {result.error}")
        return results


if __name__ == "__main__":
    serve(GenerateBatch)
