"""The cost of structured output in a decode step: a batch of 16 answers that follow a JSON schema
against the same batch without one, step by step in alternation.

    python benchmarks/guidance_step.py
    python benchmarks/guidance_step.py --model demo --batch 4

Times are processor time of this process, with one thread, and contain the masks and the sampling.
On a busy machine only the ratio of medians taken in alternation means anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from text_model import write_text_model

from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.sampler import SampleRequest
from kvrelay.engine.sequence_segment import Segment
from kvrelay.models import resolve_model
from kvrelay.types.requests import Guidance, SamplingParams

BLOCK_SIZE = 32
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"enum": ["Paris", "Rome", "Vienna"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
# Long enough for all steps.
SCHEMA = {"type": "array", "items": PERSON, "minItems": 50}


class Batch:
    """Sequences that grow by a token a step. Their prompts are not computed."""

    def __init__(self, runner: ModelRunner, size: int, past: int, steps: int, guided: bool) -> None:
        self._runner = runner
        self._per_sequence = -(-(past + steps + 1) // BLOCK_SIZE)
        guidance = Guidance("json_schema", json.dumps(SCHEMA)) if guided else None
        self._samples = [self._sample(guidance, past, seed) for seed in range(size)]

    def _sample(self, guidance: Guidance | None, past: int, seed: int) -> SampleRequest:
        tokens = [7] * (past + 1)
        params = SamplingParams(temperature=1.0, seed=seed, guidance=guidance)
        matcher = None
        if guidance is not None:
            matcher = self._runner.grammars.open(guidance, tokens, len(tokens), "")
        return SampleRequest(params, tokens, len(tokens), frozenset(), matcher)

    def step(self) -> float:
        """Samples a token of each sequence. Returns the seconds of processor time."""
        segments = [
            Segment(
                [sample.token_ids[-1]],
                len(sample.token_ids) - 1,
                range(place * self._per_sequence, (place + 1) * self._per_sequence),
                sample,
            )
            for place, sample in enumerate(self._samples)
        ]
        began = time.process_time()
        sampled = self._runner.run(segments)
        seconds = time.process_time() - began
        for sample, (one,) in zip(self._samples, sampled, strict=True):
            sample.token_ids.append(one.token_id)
        return seconds


def main() -> None:
    """Prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="m200", help="m200 (random weights), or a folder.")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--past", type=int, default=1024, help="Tokens before the first step.")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "m200"
        path = str(write_text_model(folder)) if options.model == "m200" else options.model
        measured = measure(resolve_model(path), options)
    print(json.dumps(vars(options) | measured))


def measure(folder: str, options: argparse.Namespace) -> dict[str, object]:
    """Steps with and without guidance in alternation."""
    runner = ModelRunner.load(folder, kv_bytes=2**30, block_size=BLOCK_SIZE, threads=1)
    shape = (runner, options.batch, options.past, 2 * options.steps)
    free, guided = (Batch(*shape, guided=one) for one in (False, True))
    # The first steps of a shape run in Python, until it is captured.
    for _ in range(8):
        free.step(), guided.step()
    pairs = [(free.step(), guided.step()) for _ in range(options.steps)]
    medians = [statistics.median(pair[i] for pair in pairs) for i in (0, 1)]
    runner.close()
    return {
        "engine": runner.engine,
        "vocabulary": runner.vocab_size,
        "free_ms": round(1e3 * medians[0], 2),
        "guided_ms": round(1e3 * medians[1], 2),
        "ratio_of_medians": round(medians[1] / medians[0], 3),
        "slowest_guided_ms": round(1e3 * max(pair[1] for pair in pairs), 2),
    }


if __name__ == "__main__":
    main()
