"""Reads an answer over several routers. If a router ends during an answer, the next router
continues the answer at the same token.

    KVRELAY_TARGETS=10.0.0.1:50051,10.0.0.2:50051 python examples/several_routers.py

The client only needs the addresses of the routers. To continue an answer after the end of the
client process, store its seed and its token ids, and pass them as `seed` and `resume`. The second
half of the program shows this.
"""

from __future__ import annotations

import os
import sys

import kvrelay

PROMPT = "Once upon a time there was a brave little fox named Ruby."
SEED = 7


def main() -> None:
    default = os.environ.get("KVRELAY_TARGET", "127.0.0.1:50051")
    targets = os.environ.get("KVRELAY_TARGETS", default).split(",")
    with kvrelay.Client(targets) as client:
        whole = client.generate(PROMPT, max_tokens=24, seed=SEED).result()
        print(f"{len(whole.token_ids)} tokens in {whole.calls} calls: {whole.text}")

        saved: list[int] = []
        with client.generate(PROMPT, max_tokens=24, seed=SEED) as stream:
            for token in stream.tokens():
                saved.append(token.token_id)
                if len(saved) == 10:
                    # Simulates the end of the process. Leaving the stream cancels the request.
                    break
        rest = client.generate(PROMPT, max_tokens=24, seed=SEED, resume=saved).result()
    same = (*saved, *rest.token_ids) == whole.token_ids
    print(
        f"resumed after {len(saved)} tokens: {'the same answer' if same else 'A DIFFERENT ANSWER'}"
    )


if __name__ == "__main__":
    try:
        main()
    except kvrelay.KvRelayError as error:
        sys.exit(f"{type(error).__name__}: {error}")
