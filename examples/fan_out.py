"""Sends 100 requests at once over one connection, with asyncio."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import kvrelay

REQUESTS = 100


async def main() -> None:
    async with kvrelay.AsyncClient(os.environ.get("KVRELAY_TARGET", "127.0.0.1:50051")) as client:
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            answers = [
                tasks.create_task(
                    client.generate(f"Story number {one}:", max_tokens=8, seed=one).result()
                )
                for one in range(REQUESTS)
            ]
        seconds = time.monotonic() - began
    completions = [one.result() for one in answers]
    tokens = sum(len(one.token_ids) for one in completions)
    firsts = sorted(one.ttft_seconds for one in completions if one.ttft_seconds is not None)
    print(
        f"{len(completions)} answers, {tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} "
        f"tokens/s"
    )
    print(
        f"time to first token: median {firsts[len(firsts) // 2] * 1000:.0f} ms, maximum "
        f"{firsts[-1] * 1000:.0f} ms"
    )


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except ExceptionGroup as group:
        failures, others = group.split(kvrelay.KvRelayError)
        if others is not None or failures is None:
            raise
        sys.exit(f"The first failure: {failures.exceptions[0]}")
