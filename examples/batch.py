"""A file of prompts to a file of answers, JSON Lines, so many at a time.

    python examples/batch.py prompts.jsonl answers.jsonl

Each line of the first is {"prompt": ..., and anything else that `generate` takes}. Answers are
written as they are ready, with the number of their line, from 1; a line that fails says so in its
place, and the others go on.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from typing import TextIO

import kvrelay

AT_ONCE = 16


async def answer_all(lines: Iterator[tuple[int, str]], out: TextIO) -> None:
    async with kvrelay.AsyncClient(os.environ.get("KVRELAY_TARGET", "127.0.0.1:50051")) as client:
        await client.wait_ready()

        async def work() -> None:
            for number, line in lines:  # shared: each takes the next
                try:
                    answer = await client.generate(**json.loads(line))
                    row = {
                        "line": number,
                        "text": answer.text,
                        "finish_reason": answer.finish_reason,
                    }
                except (kvrelay.KvRelayError, ValueError, TypeError) as error:
                    row = {"line": number, "error": f"{type(error).__name__}: {error}"}
                out.write(json.dumps(row) + "\n")
                out.flush()  # what is answered stays, whatever happens

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(work())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/batch.py PROMPTS.jsonl ANSWERS.jsonl")
    with (
        open(sys.argv[1], encoding="utf-8") as source,
        open(sys.argv[2], "w", encoding="utf-8") as target,
    ):
        asyncio.run(answer_all(enumerate(source, 1), target))
