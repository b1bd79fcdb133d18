"""The continuous batching of transformers, `generate_batch`. transformers chooses the attention and
the graphs by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvrelay.bench.engines.loop import serve

# The default of transformers.
BLOCK_TOKENS = 256


class GenerateBatch:
    """`generate_batch` accepts whole requests only. So each measurement prefills the batch again,
    and the measured times are read from the timestamps of the generated tokens.
    """

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
            # The default would use the rest of the memory.
            num_blocks=settings["kv_tokens"] // BLOCK_TOKENS + 2 * settings["most_batch"],
            # Differs from the default of transformers.
            max_batch_tokens=self._step_tokens,
            max_requests_per_batch=settings["most_batch"],
            # All prompts are new, so there is nothing to share.
            allow_block_sharing=False,
        )
        self._batch: list[list[int]] = []

    def facts(self) -> dict[str, Any]:
        """Returns the name, the tokens per step and the attention implementation."""
        name = f"transformers {self._version} generate_batch"
        return {"name": name, "chunk_tokens": self._step_tokens, "attention": self._attention}

    def prefill(self, prompt: list[int]) -> float:
        """Returns seconds from the moment when the scheduler starts the prompt, where kvrelay's
        measurement starts too, to the first token.
        """
        (result,) = self._generate([prompt], 1)
        return float(result.timestamps[0] - result.lifespan[0])

    def open(self, prompts: list[list[int]]) -> None:
        """Stores the batch. `decode` prefills it again for each measurement."""
        self._batch = prompts

    def decode(self, steps: int) -> float:
        """Returns the seconds for `steps` tokens of the sequence that begins last. All other
        sequences decode in the same steps until it is done.
        """
        prompt_tokens = sum(map(len, self._batch))
        ahead = math.ceil(prompt_tokens / (self._step_tokens - len(self._batch))) + len(self._batch)
        results = self._generate(self._batch, 1 + steps + ahead)
        last = max(results, key=lambda result: result.timestamps[0])
        began, ended = last.timestamps[0], last.timestamps[steps]
        assert all(result.timestamps[-1] >= ended for result in results), (
            "a step generates one token per sequence"
        )
        # The sequences grow, as they do in the other engines.
        grown = zip(self._batch, results, strict=True)
        self._batch = [[*prompt, *result.generated_tokens[:steps]] for prompt, result in grown]
        return float(ended - began)

    def close(self) -> None:
        """Drops the batch."""
        self._batch = []

    def _generate(self, prompts: list[list[int]], max_new_tokens: int) -> Sequence[Any]:
        """Returns the results in the order of the prompts."""
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
                f"generate_batch answered {len(results)} of {len(prompts)} requests; see its log"
            )
        for result in results:
            if result.error is not None:
                raise RuntimeError(f"generate_batch failed: {result.error}")
        return results


if __name__ == "__main__":
    serve(GenerateBatch)
