"""Warm-up steps, which run before user requests: the first compiles kernels and allocates memory,
the second measures the time of a step.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.sampler import SampleRequest
from kvrelay.engine.sampling.sequence_faults import SegmentsFailed
from kvrelay.engine.sequence_segment import Segment
from kvrelay.types.requests import SamplingParams

WARMUP_STEPS = 2


def warmup_segment(runner: ModelRunner) -> Segment:
    """One block of tokens, or a context that is shorter, after which a token is sampled."""
    tokens = [0] * min(runner.layout.block_size, runner.max_model_len)
    sample = SampleRequest(SamplingParams(seed=0), tokens, len(tokens))
    return Segment(tokens, start=0, blocks=[0], sample=sample)


def warm_up(runner: ModelRunner) -> None:
    """Runs the warm-up steps in a separate thread and stores the result in `runner.warmup`. Blocks
    the caller.
    """
    segment = warmup_segment(runner)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="warm-up") as thread:
        for _ in range(WARMUP_STEPS):
            began = time.monotonic()
            # The step ran. If it has no token, user requests will show the fault.
            with suppress(SegmentsFailed):
                thread.submit(runner.run, [segment]).result()
            seconds = time.monotonic() - began
    runner.warmup = len(segment.token_ids), seconds
