"""Streams requests at constant intervals through the `openai` package, like an application. The
script requires no other package.

python openai_load.py --base-url http://127.0.0.1:8000/v1 --model demo --out result.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAIError

WORDS = (
    "the a one river night child king story old small bright found lost went told under over after "
    "while water"
)


async def main(options: argparse.Namespace) -> None:
    """Sends all requests and writes the results."""
    draw = random.Random(options.seed)
    prompts = [
        " ".join(draw.choices(WORDS.split(), k=options.prompt_tokens))
        for _ in range(options.num_requests)
    ]
    async with AsyncOpenAI(base_url=options.base_url, api_key="none", max_retries=0) as client:
        # A warm-up call, because the first call of a client is slow.
        await one(client, options, WORDS)
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for number, prompt in enumerate(prompts):
                await asyncio.sleep(max(0.0, start + number / options.rate - time.perf_counter()))
                tasks.append(group.create_task(one(client, options, prompt)))
    options.out.write_text(json.dumps({"requests": [task.result() for task in tasks]}))


async def one(client: AsyncOpenAI, options: argparse.Namespace, prompt: str) -> dict[str, Any]:
    """Sends one request. Returns its times in seconds; TTFT is from the call to the first chunk
    with text.
    """
    times: list[float] = []
    usage = None
    error = ""
    start = time.perf_counter()
    try:
        async for chunk in await stream(client, options, prompt):
            usage = chunk.usage or usage
            if any(
                choice.delta.content if options.chat else choice.text for choice in chunk.choices
            ):
                times.append(time.perf_counter())
    except OpenAIError as failure:
        error = f"{type(failure).__name__}: {failure}"
    if not error and (usage is None or not times):
        error = "no usage" if usage is None else "no text"
    return {
        "error": error,
        "ttft_s": times[0] - start if times else None,
        "itl_s": [after - before for before, after in pairwise(times)],
        "prompt_tokens": usage.prompt_tokens if usage else 0,
        "output_tokens": usage.completion_tokens if usage else 0,
    }


async def stream(client: AsyncOpenAI, options: argparse.Namespace, prompt: str) -> Any:
    """Returns the stream of one answer."""
    common: dict[str, Any] = {
        "model": options.model,
        "max_tokens": options.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"ignore_eos": True},
    }
    if options.chat:
        return await client.chat.completions.create(
            messages=[{"role": "user", "content": prompt}], **common
        )
    return await client.completions.create(prompt=prompt, **common)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--num-requests", type=int, default=50)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    asyncio.run(main(parser.parse_args()))
