"""What one process answers, without a cluster around it: all of the prompt in one step, then token
by token.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.sampler import SampleRequest
from kvrelay.engine.sequence_segment import Segment
from kvrelay.types.requests import SamplingParams


def answer_of(
    runner: ModelRunner, prompt: Sequence[int], params: SamplingParams, count: int
) -> list[int]:
    """`count` tokens; closes the runner, of whose KV memory it takes all."""
    tokens, start = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        request = SampleRequest(params, tokens, len(prompt))
        ((drawn,),) = runner.run(
            [Segment(tokens[start:], start, range(runner.num_blocks), request)]
        )
        start = len(tokens)
        tokens.append(drawn.token_id)
    runner.close()
    return tokens[len(prompt) :]
