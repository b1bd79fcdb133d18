"""Answers a file of prompts, AT_ONCE prompts at a time. Both files are JSON Lines.

    python examples/batch.py prompts.jsonl answers.jsonl

Each line of the prompts is {"prompt": ..., and other arguments of `generate`}. Each answer is
written when it is ready, with the number of its line, from 1. A request that fails produces a line
with its error; the others continue, and the exit code is 1.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TextIO

import kvrelay

AT_ONCE = 16
ARGUMENTS = {"prompt", "timeout", *kvrelay.GenerateOptions.__annotations__}


async def answer_all(lines: enumerate[str], out: TextIO) -> dict[str, int]:
    """Answers numbered lines and writes the answers to `out`. Returns how many there are."""
    written = {"text": 0, "error": 0}
    async with kvrelay.AsyncClient(os.environ.get("KVRELAY_TARGET", "127.0.0.1:50051")) as client:

        async def work() -> None:
            # The tasks share the iterator, so each task takes the next line.
            for number, line in lines:
                try:
                    request = json.loads(line)
                    if not isinstance(request, dict):
                        raise ValueError('a line must be an object such as {"prompt": "Once"}')
                    if unknown := request.keys() - ARGUMENTS:
                        raise ValueError(f"{', '.join(unknown)}: generate has no such argument")
                    answer = await client.generate(**request)
                    reason = answer.finish_reason
                    row = {"line": number, "text": answer.text, "finish_reason": reason}
                except (kvrelay.KvRelayError, ValueError) as error:
                    row = {"line": number, "error": f"{type(error).__name__}: {error}"}
                written["error" if "error" in row else "text"] += 1
                # Flushed, so that finished answers are kept if the program is killed.
                print(json.dumps(row), file=out, flush=True)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return written


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/batch.py PROMPTS.jsonl ANSWERS.jsonl")
    try:
        with open(sys.argv[1]) as source, open(sys.argv[2], "w") as target:
            found = asyncio.run(answer_all(enumerate(source, 1), target))
    except OSError as error:
        sys.exit(str(error))
    print("{text} answers and {error} errors are in".format(**found), f"{sys.argv[2]}.")
    sys.exit(found["error"] > 0)
