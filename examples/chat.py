"""Runs a conversation. Each line from stdin is a message; an empty line or Ctrl-D ends the program.

The model must have a chat template. The prompts of all turns share a prefix, so the prefix cache
holds most tokens of the later prompts, in whole blocks.
"""

from __future__ import annotations

import os
import sys

import kvrelay


def ask() -> str:
    """Returns the next line; empty at the end."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline().strip()


def main() -> None:
    print("Say something; an empty line ends.")
    messages: list[dict[str, str]] = [{"role": "system", "content": "You tell short stories."}]
    with kvrelay.Client(os.environ.get("KVRELAY_TARGET", "127.0.0.1:50051")) as client:
        while line := ask():
            messages.append({"role": "user", "content": line})
            with client.generate(messages=messages, max_tokens=32) as stream:
                for event in stream:
                    print(event.text, end="", flush=True)
                answer = stream.result()
            messages.append({"role": "assistant", "content": answer.text})
            print(
                f"\n[{answer.usage.cached_tokens} of {answer.usage.prompt_tokens} prompt tokens "
                f"were cached]"
            )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print()
    except kvrelay.KvRelayError as error:
        sys.exit(f"{type(error).__name__}: {error}")
