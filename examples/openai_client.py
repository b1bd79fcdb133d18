"""Uses the `openai` package with kvrelay. Only the base URL changes.

pip install openai
"""

from __future__ import annotations

import os
import sys

from openai import APIConnectionError, OpenAI

BASE = os.environ.get("KVRELAY_HTTP", "http://127.0.0.1:8000")


def main() -> None:
    with OpenAI(base_url=f"{BASE}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        chunks = client.completions.create(
            model=model,
            prompt="Once upon a time there was a brave little fox named Ruby.",
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        for chunk in chunks:
            if chunk.choices:
                print(chunk.choices[0].text, end="", flush=True)
            if chunk.usage is not None:
                print(f"\n{chunk.usage.completion_tokens} tokens")


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(f"Nothing answers at {BASE}; start a cluster with `kvrelay serve`.")
