"""vLLM engines alone: reads orders as a JSON list on stdin, and writes the greedy answers to each
order on stdout, one line of JSON each.

An order has the model's folder, its prompts, max_tokens, and may have the dtype, whether prompts
run one by one, and arguments of the engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WAIT_S = 600.0


def alone(*orders: dict[str, Any]) -> list[list[list[int]]]:
    """Returns the answers to each order, from a process that knows nothing of kvrelay's engine."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(orders),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    return [json.loads(line) for line in answers]


def main() -> None:
    os.environ |= {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    # Not the folder of this file, whose names are those of tests
    sys.path = [path for path in sys.path if Path(path) != Path(__file__).parent]
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    for order in json.load(sys.stdin):
        # A process has one engine.
        if not (pid := os.fork()):
            print(json.dumps(_answers(**order)), flush=True)
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            sys.exit("an engine has failed")


def _answers(
    model: str,
    prompts: list[list[int]],
    max_tokens: int,
    dtype: str = "float32",
    *,
    one_by_one: bool = False,
    **arguments: Any,
) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    settings = {
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 192 * 2**20,
        "skip_tokenizer_init": True,
        "block_size": 32,
    }
    llm = LLM(model=model, dtype=dtype, enforce_eager=True, **{**settings, **arguments})
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    runs = [[one] for one in asked] if one_by_one else [asked]
    return [
        list(answer.outputs[0].token_ids)
        for run in runs
        for answer in llm.generate(run, params, use_tqdm=False)
    ]


if __name__ == "__main__":
    main()
