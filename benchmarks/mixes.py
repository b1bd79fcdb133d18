"""Mixes of prompts and answers, by their lengths in tokens."""

from __future__ import annotations

from collections.abc import Iterator

from kvrelay.loadtest.lengths import parse_lengths
from kvrelay.loadtest.rate import constant
from kvrelay.loadtest.workload import PlannedRequest, Workload

# Seconds after which the lengths change, in a mix with several.
PHASE_S = 60.0

_LONG_PROMPTS = ("lognormal:median=1200,sigma=0.4,min=400,max=2048", "4-16")
_LONG_ANSWERS = ("16-128", "128-256")
# Lengths of prompts and answers, for each phase.
MIXES = {
    "mixed": (("lognormal:median=400,sigma=0.8,min=32,max=2048", "16-64"),),
    "long-prompts": (_LONG_PROMPTS,),
    "long-answers": (_LONG_ANSWERS,),
    "alternating": (_LONG_PROMPTS, _LONG_ANSWERS),
}


def plan(
    mix: str, rate: float, num_requests: int, seed: int, vocab_size: int
) -> Iterator[PlannedRequest]:
    """Yields requests with Poisson arrivals. The same seed draws the same requests at each rate, if
    the mix has one phase; only the gaps differ.
    """
    phases = [
        Workload(
            rate=constant(rate),
            burstiness=1.0,
            num_requests=num_requests,
            duration=None,
            prompt_tokens=parse_lengths(prompts, "prompt_tokens"),
            output_tokens=parse_lengths(answers, "output_tokens"),
            text=False,
            seed=seed,
        ).plan(vocab_size)
        for prompts, answers in MIXES[mix]
    ]
    # All phases draw the same times, since these are drawn first.
    for alternatives in zip(*phases, strict=True):
        yield alternatives[int(alternatives[0].at // PHASE_S) % len(phases)]
