"""One answer over several routers: when one goes away in its midst, the next goes on from the same
token.

    KVRELAY_TARGETS=10.0.0.1:50051,10.0.0.2:50051 python examples/several_routers.py

Nothing has to be done for it but to name them. An answer that must outlive this process as well
keeps its seed and its token ids, and gives them back as `seed` and `resume`; that is what the
second half shows.
"""

from __future__ import annotations

import os

import kvrelay

PROMPT = "Once upon a time there was a brave little fox named Ruby."
SEED = 7


def main() -> None:
    default = os.environ.get("KVRELAY_TARGET", "127.0.0.1:50051")
    targets = os.environ.get("KVRELAY_TARGETS", default).split(",")
    with kvrelay.Client(targets) as client:
        client.wait_ready()
        whole = client.generate(PROMPT, max_tokens=24, seed=SEED).result()
        print(f"{len(whole.token_ids)} tokens in {whole.calls} calls: {whole.text}")

        saved: list[int] = []
        with client.generate(PROMPT, max_tokens=24, seed=SEED) as stream:
            for token in stream.tokens():
                saved.append(token.token_id)
                if len(saved) == 10:
                    break  # as if the process ended here; leaving the stream cancels the request
        rest = client.generate(PROMPT, max_tokens=24, seed=SEED, resume=saved).result()
    same = (*saved, *rest.token_ids) == whole.token_ids
    print(f"resumed after {len(saved)} tokens: {'the same answer' if same else 'ANOTHER ANSWER'}")


if __name__ == "__main__":
    main()
