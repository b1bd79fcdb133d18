"""kvrelay's engine, called in the same way as the workers call it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvrelay.bench.engines.loop import serve

NAME = "kvrelay"
# In the batches of a benchmark.
_MOST_SEQUENCES = 256


class Kvrelay:
    """Places each sequence of a batch on adjacent blocks, as the allocator does while there is
    room.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        # Same variables as in a worker. torch reads them when it is loaded, so the engine is
        # imported afterwards.
        os.environ |= {"OMP_NUM_THREADS": str(settings["threads"]), "OMP_WAIT_POLICY": "PASSIVE"}
        import torch

        from kvrelay.bench.shapes import random_model
        from kvrelay.engine.attention import paged_attention as attention
        from kvrelay.engine.base.device import find_device
        from kvrelay.engine.model.loader import load_model, loaded_model
        from kvrelay.engine.runner import ModelRunner
        from kvrelay.engine.sampling.sampler import SampleRequest
        from kvrelay.engine.sequence_segment import Segment
        from kvrelay.types.requests import SamplingParams

        self._imported = time.perf_counter()
        device = str(find_device(settings["device"]))
        torch.set_num_threads(settings["threads"])
        if settings["shape"] is not None:
            model = random_model(settings["shape"], device, attn_implementation=attention.NAME)
            loaded = loaded_model(model, settings["shape"], settings["shape"])
        else:
            loaded = load_model(settings["model"], dtype=settings["dtype"], device=device)
        self._context: int = loaded.max_model_len
        self._runner = ModelRunner.of(
            loaded,
            kv_bytes=settings["kv_bytes"],
            max_model_len=settings["max_model_len"],
            **settings["load"],
        )
        # As a decode worker does on a GPU. On a CPU, this does nothing: steps that recur are
        # captured.
        self._runner.capture_decode_steps(_MOST_SEQUENCES, 0.0)
        self._segment = Segment
        self._sample = SampleRequest
        self._greedy = SamplingParams(temperature=0, ignore_eos=True)
        self._chunk_tokens: int = settings["chunk_tokens"]
        # For each sequence: its tokens and its blocks. The last token has no KV yet.
        self._batch: list[tuple[list[int], range]] = []

    def facts(self) -> dict[str, Any]:
        """Returns the name, the chunk size in tokens, which kernels and graphs are in use, the
        sizes of the model and of its KV, and the seconds since the modules were imported.
        """
        layout = self._runner.layout
        return {
            "name": NAME,
            "chunk_tokens": self._chunk_tokens,
            "kernels": self._runner.kernels,
            "without_kernels": self._runner.without_kernels,
            "not_captured": self._runner.not_captured,
            "engine": self._runner.engine,
            "model_len": self._context,
            "vocab_size": self._runner.vocab_size,
            "kv_tokens": self._runner.num_blocks * layout.block_size,
            "block_bytes": layout.block_bytes,
            "layout": asdict(layout),
            "seconds_since_imports": time.perf_counter() - self._imported,
        }

    def prefill(self, prompt: list[int]) -> float:
        """Prefills one prompt in chunks; returns seconds to its first token."""
        started = time.perf_counter()
        self._first_token(prompt, range(self._runner.num_blocks))
        return time.perf_counter() - started

    def open(self, prompts: list[list[int]]) -> None:
        """Prefills a batch of prompts, each on an equal share of the blocks."""
        share = self._runner.num_blocks // len(prompts)
        for i, prompt in enumerate(prompts):
            blocks = range(i * share, (i + 1) * share)
            self._batch.append(([*prompt, self._first_token(prompt, blocks)], blocks))

    def decode(self, steps: int) -> float:
        """Runs `steps` decode steps on the open batch; returns seconds."""
        started = time.perf_counter()
        for _ in range(steps):
            segments = [
                self._segment(
                    tokens[-1:],
                    len(tokens) - 1,
                    self._held(blocks, len(tokens)),
                    self._sample(self._greedy, tokens, 1),
                )
                for tokens, blocks in self._batch
            ]
            for (tokens, _), (sampled,) in zip(
                self._batch, self._runner.run(segments), strict=True
            ):
                tokens.append(sampled.token_id)
        return time.perf_counter() - started

    def close(self) -> None:
        """Drops the open batch."""
        self._batch = []

    def _first_token(self, prompt: list[int], blocks: Sequence[int]) -> int:
        *before, last = range(0, len(prompt), self._chunk_tokens)
        for start in before:
            end = start + self._chunk_tokens
            self._runner.run([self._segment(prompt[start:end], start, self._held(blocks, end))])
        sample = self._sample(self._greedy, prompt, len(prompt))
        held = self._held(blocks, len(prompt))
        ((sampled,),) = self._runner.run([self._segment(prompt[last:], last, held, sample)])
        return sampled.token_id

    def _held(self, blocks: Sequence[int], tokens: int) -> Sequence[int]:
        """Returns the blocks that a sequence of `tokens` tokens holds. A step takes longer for each
        block, used or not.
        """
        return blocks[: -(-tokens // self._runner.layout.block_size)]


if __name__ == "__main__":
    serve(Kvrelay)
