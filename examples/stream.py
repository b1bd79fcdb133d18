"""Prints an answer as it arrives.

python examples/stream.py "Once upon a time"
"""

from __future__ import annotations

import os
import sys

import kvrelay

PROMPT = "Once upon a time there was a brave little fox named Ruby."


def main(prompt: str) -> None:
    target = os.environ.get("KVRELAY_TARGET", "127.0.0.1:50051")
    with (
        kvrelay.Client(target) as client,
        client.generate(prompt, max_tokens=40, temperature=0.0) as stream,
    ):
        for event in stream:
            print(event.text, end="", flush=True)
        # Returns at once, because the stream has ended.
        answer = stream.result()
    print(
        f"\n\n{answer.finish_reason} after {answer.usage.completion_tokens} tokens, "
        f"{answer.path}: {answer.why}"
    )
    if answer.ledger is not None:
        for phase, seconds in answer.ledger.phases:
            print(f"  {phase:14} {seconds * 1000:8.2f} ms")


if __name__ == "__main__":
    try:
        main(" ".join(sys.argv[1:]) or PROMPT)
    except kvrelay.KvRelayError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except BrokenPipeError:
        # Whoever reads the output, such as head, has ended. Nothing is left to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
