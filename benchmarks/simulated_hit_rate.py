"""Compares the prefix cache of a simulated worker with a plain LRU cache over the same trace:
`python benchmarks/simulated_hit_rate.py conversation_trace.jsonl --tokens 500000,3000000`.

The trace is Mooncake's (Qin et al., "Mooncake", FAST '25), whose requests name the blocks of 512
tokens of their prompts. Lengths are scaled by 1/32, blocks and caches too, so that a block has 16
tokens. The worker's step times hardly matter; requests overlap as they do in the trace. The exit
code is 1 if a rate differs by more than --limit.
"""

from __future__ import annotations

from collections import OrderedDict
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from kvrelay.config.schema import ClusterConfig
from kvrelay.loadtest.lengths import Uniform
from kvrelay.loadtest.traces.replay import Replay
from kvrelay.loadtest.traces.trace import TraceRequest
from kvrelay.loadtest.traces.trace_mooncake import BLOCK_TOKENS
from kvrelay.planning.profile import Profile
from kvrelay.planning.step_cost_model import StepCostModel
from kvrelay.simulation.scenario import Scenario
from kvrelay.simulation.simulation import simulate

SCALE = 32
BLOCK = BLOCK_TOKENS // SCALE
TOKEN_BYTES = 128
FAST = StepCostModel(
    prefill_base_s=5e-4,
    prefill_token_s=1e-6,
    prefill_token_context_s=0.0,
    decode_base_s=5e-4,
    decode_sequence_s=1e-5,
    decode_context_token_s=0.0,
    handoff_base_s=0.0,
    handoff_byte_s=0.0,
    start_s=0.0,
    role_change_s=0.0,
    kind="analytic",
)


def lru(requests: list[TraceRequest], blocks: int) -> float:
    """Returns the share of the prompt tokens that an LRU cache of so many blocks holds, if each
    prompt is computed at once. The last token is never reused.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    hits = tokens = 0
    for one in requests:
        tokens += one.input_tokens
        found = 0
        for block in one.blocks:
            if block not in cache:
                break
            found += 1
        hits += min(found, (one.input_tokens - 1) // BLOCK) * BLOCK
        # The tail first, so that a prefix stays longer.
        for block in reversed(one.blocks[: one.input_tokens // BLOCK]):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return hits / tokens


def simulated(replay: Replay, tokens: int) -> float:
    """Returns the share of the prompt tokens that a simulated worker takes from its cache."""
    config = ClusterConfig.model_validate(
        {
            "kv": {"block_size": BLOCK, "memory": tokens // SCALE * TOKEN_BYTES},
            "decode": {"chunk_tokens": 4096, "max_batch": 64},
            "router": {"max_queue": 100_000},
            "slo": None,
        }
    )
    worker = Profile(FAST, TOKEN_BYTES, 2**20, 32_000)
    scenario = Scenario(config, {"prefill": (), "decode": (worker,)})
    report = simulate(scenario, replay.plan(worker.vocab_size), {}, max_rows=10**9)
    prompts = sum(row.prompt_tokens for row in report.answered)
    return sum(row.cached_tokens for row in report.answered) / prompts


def main(
    trace: Annotated[Path, typer.Argument(help="Mooncake trace, JSONL.")],
    tokens: Annotated[
        str, typer.Option(help="Cache sizes in tokens of the trace.")
    ] = "500000,3000000,1000000000",
    limit: Annotated[float, typer.Option(help="Largest difference of a hit rate.")] = 0.02,
) -> None:
    """Print the hit rate of a simulated worker and of a plain LRU cache, by cache size."""
    lengths = Uniform(1, 1)
    replay = Replay(
        trace, "mooncake", 0.0, Fraction(1), Fraction(1, SCALE), None, None, lengths, lengths, 0
    )
    requests, missed = replay.requests(), 0
    print("tokens        simulated  LRU")
    for size in map(int, tokens.split(",")):
        found, expected = simulated(replay, size), lru(requests, size // BLOCK_TOKENS)
        missed += abs(found - expected) > limit
        print(f"{size:<13} {found:>9.1%}  {expected:.1%}")
    raise typer.Exit(1 if missed else 0)


if __name__ == "__main__":
    typer.run(main)
