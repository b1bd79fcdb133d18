"""The time of a decode step with KV in each dtype: auto, int8 and int4, step by step in turn.

    python benchmarks/kv_dtypes.py --context 4096 --batch 8

One thread, the model m200. The limit is the time to read the weights and the KV once, at the
bandwidth that one thread reaches here. Run nothing else on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from kvrelay.bench.limits import measure_limits
from kvrelay.bench.reference_model import reference_model
from kvrelay.config.pools import KvDtype
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.process.machine import processor_name

DTYPES: tuple[KvDtype, ...] = ("auto", "int8", "int4")
BLOCK_SIZE = 32


class Steps:
    """Decode steps of one runner, each of a token for `batch` sequences after `context` tokens."""

    def __init__(self, model: str, kv_dtype: KvDtype, context: int, batch: int) -> None:
        blocks = -(-(context + 1) // BLOCK_SIZE)
        self.runner = ModelRunner.load(
            model,
            kv_dtype=kv_dtype,
            kv_bytes=lambda _loaded, layout, _longest: batch * blocks * layout.block_bytes,
            block_size=BLOCK_SIZE,
            max_model_len=context + 1,
            threads=1,
        )
        self.kv_bytes = batch * context * self.runner.layout.block_bytes / BLOCK_SIZE
        tables = [range(place * blocks, (place + 1) * blocks) for place in range(batch)]
        prompt = [2 + i % 1000 for i in range(context)]
        for first in range(0, context, 512):
            self.runner.forward([Segment(prompt[first : first + 512], first, tables[0])], [0])
        # The time does not depend on what the blocks hold.
        for region in (one for layer in self.runner.kv.layers for one in layer.regions):
            for table in tables[1:]:
                region[table.start : table.stop] = region[:blocks]
        self._segments = [Segment([5 + i], context, table) for i, table in enumerate(tables)]
        # The first steps of a shape run in Python, until it is captured.
        for _ in range(4):
            self.run()

    def run(self) -> float:
        """Returns the seconds of one step."""
        began = time.perf_counter()
        self.runner.forward(self._segments, range(len(self._segments)))
        return time.perf_counter() - began


def main() -> None:
    """Prints one JSON object per dtype."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--context", type=int, default=4096, help="Tokens before the step.")
    parser.add_argument("--batch", type=int, default=8, help="Number of sequences.")
    parser.add_argument("--steps", type=int, default=30, help="Steps of each dtype.")
    options = parser.parse_args()
    limits = measure_limits(1)
    model = str(reference_model())
    every = {dtype: Steps(model, dtype, options.context, options.batch) for dtype in DTYPES}
    times: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    for turn in range(options.steps):
        for dtype, steps in every.items():
            times[dtype].append(steps.run())
        # The bandwidth of a shared machine changes from second to second.
        if turn % 10 == 9:
            limits = limits.best(measure_limits(1))
    int8 = statistics.median(times["int8"])
    for dtype, steps in every.items():
        median = statistics.median(times[dtype])
        limit = (steps.runner.weight_bytes + steps.kv_bytes) / limits.bandwidth
        print(
            json.dumps(
                {
                    "processor": processor_name(),
                    "context": options.context,
                    "batch": options.batch,
                    "kv": steps.runner.layout.dtype,
                    "kv_MB": round(steps.kv_bytes / 1e6, 1),
                    "step_ms": round(1e3 * median, 2),
                    "of_int8": round(median / int8, 3),
                    "limit_ms": round(1e3 * limit, 2),
                    "of_limit": round(limit / median, 3),
                }
            )
        )


if __name__ == "__main__":
    main()
