"""vLLM's offline engine, in one process. Runs as a script under the Python that has vLLM. That
Python does not need kvrelay.
"""

from __future__ import annotations

import os
import time
from typing import Any

# The folder of a script is on its import path.
from loop import Engine, serve  # type: ignore[import-not-found]

GIB = 2**30


class Vllm:
    """vLLM's `LLMEngine`, stepped by hand, with prefix caching off."""

    def __init__(self, settings: dict[str, Any]) -> None:
        cores = ",".join(map(str, settings["cores"]))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, -(-settings["kv_bytes"] // GIB)))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm

        self._name = f"vLLM {vllm.__version__}"
        self._sampling = vllm.SamplingParams
        self._engine = vllm.LLM(
            settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"],
            enable_prefix_caching=False,
            disable_log_stats=True,
            # On a GPU, vLLM would take nearly all memory, but another engine shares the GPU.
            **(
                {"kv_cache_memory_bytes": settings["kv_bytes"]}
                if settings["device"] != "cpu"
                else {}
            ),
        ).llm_engine
        self._requests = 0
        self._room = settings["max_model_len"]

    def facts(self) -> dict[str, Any]:
        """Returns the name, the tokens per step, and whether the scheduler is asynchronous."""
        scheduler = self._engine.vllm_config.scheduler_config
        return {
            "name": self._name,
            "chunk_tokens": scheduler.max_num_batched_tokens,
            "async_scheduling": scheduler.async_scheduling,
        }

    def prefill(self, prompt: list[int]) -> float:
        """Prefills one prompt; returns seconds to its first token."""
        started = time.perf_counter()
        self._add(prompt, 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - started

    def open(self, prompts: list[list[int]]) -> None:
        """Steps until each sequence has its first token. Sequences that got their first token early
        are then some tokens ahead.
        """
        missing = {self._add(prompt, self._room - len(prompt)) for prompt in prompts}
        self._open = list(missing)
        while missing:
            missing -= {
                output.request_id for output in self._engine.step() if output.outputs[0].token_ids
            }

    def decode(self, steps: int) -> float:
        """Runs `steps` decode steps on the open batch; returns seconds."""
        started = time.perf_counter()
        for _ in range(steps):
            tokens = self._engine.step()
            assert len(tokens) == len(self._open), "a step generates one token per sequence"
        return time.perf_counter() - started

    def close(self) -> None:
        """Aborts the open batch and steps until the engine is idle."""
        self._engine.abort_request(self._open)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        self._requests += 1
        params = self._sampling(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        name = str(self._requests)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name


if __name__ == "__main__":
    check: type[Engine] = Vllm
    serve(Vllm)
