"""Searches the smallest cluster for a workload of Splitwise (Patel et al., ISCA '24) by simulation,
from the published inputs:

    git clone https://github.com/Mutinifni/splitwise-sim
    python benchmarks/splitwise_provisioning.py splitwise-sim/data/perf_model.csv \\
        AzureLLMInferenceTrace_code.csv

The step times are those of BLOOM-176B on a DGX-H100 in the repository's characterization, fitted
with kvrelay's linear step costs. Lengths are drawn from the trace, and arrivals are Poisson, as in
the paper. A cluster meets the objectives if the slowdowns, against one request alone on a DGX-A100,
stay within the limits of the paper's table VI. --export writes the requests for splitwise-sim.
"""

from __future__ import annotations

import csv
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer

from kvrelay.bench.profiling.fit import fit
from kvrelay.config.schema import ClusterConfig
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.workload import PlannedRequest
from kvrelay.percentiles import percentile
from kvrelay.planning.profile import Profile
from kvrelay.planning.step_cost_model import StepCostModel
from kvrelay.simulation.scenario import Scenario
from kvrelay.simulation.simulation import simulate
from kvrelay.types.workers import PoolName

MODEL = "bloom-176b"
# Metric -> percentile -> largest slowdown.
LIMITS = {
    "TTFT": {50: 2.0, 90: 3.0, 99: 6.0},
    "TBT": {50: 1.25, 90: 1.5, 99: 5.0},
    "E2E": {50: 1.25, 90: 1.5, 99: 5.0},
}
# 70 layers, 112 heads of 128, keys and values of 2 bytes.
KV_TOKEN_BYTES = 70 * 2 * 112 * 128 * 2
# Bytes: 8 GPUs of 80 GB, and the repository's size of the weights.
MEMORY, WEIGHTS = 640 * 10**9, 329 * 10**9
# Bytes per second between two machines: 200 GB/s, as in the repository.
LINK = 200e9
COLUMNS = (
    "request_id",
    "request_type",
    "application_id",
    "arrival_timestamp",
    "batch_size",
    "prompt_size",
    "token_size",
)
# Most tokens of a prompt step and sequences of a decode step, as in the repository.
CHUNK, BATCH = 2048, 512


@dataclass(frozen=True, slots=True)
class Machine:
    """Median times of a machine, in seconds. `prompts`: of one prompt, by its tokens. `steps`: of a
    decode step, by what the repository calls the tokens of the batch.
    """

    prompts: dict[int, float]
    steps: dict[int, float]

    @classmethod
    def read(cls, file: Path, hardware: str) -> Machine:
        """Reads the characterization."""
        prompts, steps = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
        with file.open(newline="") as lines:
            for row in csv.DictReader(lines):
                if (row["model"], row["hardware"]) == (MODEL, hardware):
                    size, batch = int(row["prompt_size"]), int(row["batch_size"])
                    steps[size * batch].append(float(row["token_time"]) / 1000)
                    if batch == 1:
                        prompts[size].append(float(row["prompt_time"]) / 1000)
        return cls(
            *({key: median(found) for key, found in one.items()} for one in (prompts, steps))
        )

    def alone(self, prompt_tokens: int, output_tokens: int) -> dict[str, float]:
        """Returns the latencies of one request that has the machine for itself."""
        ttft = float(np.interp(prompt_tokens, sorted(self.prompts), sorted(self.prompts.values())))
        gap = self.steps[min(self.steps)]
        return {"TTFT": ttft, "TBT": gap, "E2E": ttft + (output_tokens - 1) * gap}

    def profile(self) -> Profile:
        """Returns a worker of one such machine, fitted as `kvrelay profile` fits: a prompt takes
        its measured time, in steps of at most CHUNK tokens.
        """
        prompt = fit(
            [(-(-one // CHUNK), one, one * (one + 1) / 2) for one in self.prompts],
            list(self.prompts.values()),
            "prompts",
        )
        small = {tokens: seconds for tokens, seconds in self.steps.items() if tokens <= CHUNK}
        step = fit([(1.0, one) for one in small], list(small.values()), "steps")
        print(f"prompts within {prompt.most:.0%} and steps within {step.most:.0%} of the fit")
        base, token, pair = prompt.coefficients
        costs = StepCostModel(
            prefill_base_s=base,
            prefill_token_s=token,
            prefill_token_context_s=pair,
            decode_base_s=step.coefficients[0],
            decode_sequence_s=step.coefficients[1],
            decode_context_token_s=0.0,
            handoff_base_s=0.0,
            handoff_byte_s=1 / LINK,
            start_s=0.0,
            role_change_s=0.0,
            kind="measured",
        )
        return Profile(costs, KV_TOKEN_BYTES, 2**15, 2**15)


def plan(trace: Path, rate: float, seconds: float, seed: int) -> Iterator[PlannedRequest]:
    """Yields requests with lengths drawn from the trace, at exponential intervals."""
    draw = random.Random(seed)
    with trace.open(newline="", encoding="utf-8-sig") as lines:
        rows = list(csv.DictReader(lines))
    at = draw.expovariate(rate)
    while at < seconds:
        # As the repository does: prompts and answers are drawn apart.
        prompt = max(1, int(draw.choice(rows)["ContextTokens"]))
        output = max(1, int(draw.choice(rows)["GeneratedTokens"]))
        yield PlannedRequest(at, None, tuple(range(prompt)), output, 0)
        at += draw.expovariate(rate)


def slowdowns(rows: list[Row], alone: Machine) -> dict[str, dict[int, float]]:
    """Returns the percentiles of each metric's slowdown."""
    found: dict[str, list[float]] = {name: [] for name in LIMITS}
    for row in rows:
        assert row.ttft_s is not None, "every request is answered"
        assert row.e2e_s is not None, "every request is answered"
        wanted = alone.alone(row.prompt_tokens, row.output_tokens)
        found["TTFT"].append(row.ttft_s / wanted["TTFT"])
        found["E2E"].append(row.e2e_s / wanted["E2E"])
        if row.tpot_s is not None:
            found["TBT"].append(row.tpot_s / wanted["TBT"])
    return {
        name: {each: percentile(sorted(values), each) for each in LIMITS[name]}
        for name, values in found.items()
    }


def main(
    perf_model: Annotated[Path, typer.Argument(help="data/perf_model.csv of splitwise-sim.")],
    trace: Annotated[Path, typer.Argument(help="Azure's trace of the workload, CSV.")],
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 70.0,
    seconds: Annotated[float, typer.Option(help="Length of each run.")] = 120.0,
    most: Annotated[int, typer.Option(help="Largest pool that is tried.")] = 40,
    export: Annotated[
        Path | None, typer.Option(help="File for the requests, as splitwise-sim reads them.")
    ] = None,
    seed: int = 0,
) -> None:
    """Print, for each number of token machines, the fewest prompt machines that meet the limits."""
    worker = Machine.read(perf_model, "h100-80gb").profile()
    a100 = Machine.read(perf_model, "a100-80gb")
    requests = list(plan(trace, rate, seconds, seed))
    if export is not None:
        with export.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(COLUMNS)
            for number, one in enumerate(requests):
                assert one.token_ids is not None, "a planned prompt has token ids"
                rows.writerow((number, 2, 0, one.at, 1, len(one.token_ids), one.output_tokens))
    config = ClusterConfig.model_validate(
        {
            "kv": {
                "memory": MEMORY - WEIGHTS,
                "prefix_cache": False,
                "block_size": 16,
            },
            "prefill": {"chunk_tokens": CHUNK},
            "decode": {"max_batch": BATCH},
            "router": {"max_queue": 1_000_000, "local_below_tokens": 0},
            "slo": None,
        }
    )

    def meets(prompt: int, token: int) -> bool:
        pools: dict[PoolName, tuple[Profile, ...]] = {
            "prefill": (worker,) * prompt,
            "decode": (worker,) * token,
        }
        report = simulate(Scenario(config, pools), requests, {}, max_rows=10**9)
        found = slowdowns(list(report.answered), a100)
        texts = (
            f"{name} " + " ".join(f"{found[name][each]:.2f}" for each in LIMITS[name])
            for name in LIMITS
        )
        print(f"{prompt:>3}P {token:>2}T  {'  '.join(texts)}", flush=True)
        return all(
            found[name][each] <= limit
            for name, limits in LIMITS.items()
            for each, limit in limits.items()
        )

    print(f"{len(requests)} requests; slowdowns at p50 p90 p99 of TTFT, TBT and E2E")
    best: tuple[int, int] | None = None
    for token in range(1, most + 1):
        low, high = 1, (most if best is None else sum(best) - token - 1)
        if high < low:
            break
        if not meets(high, token):
            continue
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if meets(middle, token) else (middle + 1, high)
        best = (high, token)
    print("no cluster of this size" if best is None else f"smallest: {best[0]}P {best[1]}T")


if __name__ == "__main__":
    typer.run(main)
