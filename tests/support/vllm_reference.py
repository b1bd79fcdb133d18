"""One vLLM engine alone: reads prompts as JSON on stdin, writes the greedy answers on stdout."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    os.environ |= {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    # Not the folder of this file, whose names are those of tests
    sys.path = [path for path in sys.path if Path(path) != Path(__file__).parent]
    from vllm import LLM, SamplingParams

    import kvrelay.models

    order = json.load(sys.stdin)
    llm = LLM(
        model=str(Path(kvrelay.models.__file__).parent / "demo"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=8,
        kv_cache_memory_bytes=192 * 2**20,
        skip_tokenizer_init=True,
        block_size=32,
    )
    params = SamplingParams(
        temperature=0, max_tokens=order["max_tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in order["prompts"]]
    answers = llm.generate(prompts, params, use_tqdm=False)
    print(json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))


if __name__ == "__main__":
    main()
