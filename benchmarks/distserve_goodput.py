"""Searches the highest rate per GPU of a disaggregated and of a colocated cluster by simulation,
from the published measurements of DistServe (Zhong et al., OSDI '24):

    git clone https://github.com/LLMServe/DistServe
    python benchmarks/distserve_goodput.py DistServe/simdistserve/estimators/profile_data

The step times are those of OPT on an A100 in the repository: of DistServe's engine for the
disaggregated cluster (one prefill worker with --tp-prefill GPUs, one decode worker with --tp-decode
GPUs), and of vLLM's for the colocated one (one worker with --tp-vllm GPUs, which computes a whole
prompt in a step). Arrivals are Poisson. A rate is sustained if 90 % of the requests meet the TTFT
and 90 % meet the mean time per token. --export writes the requests of each rate for DistServe's own
simulator.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from kvrelay.config.schema import ClusterConfig
from kvrelay.loadtest.workload import PlannedRequest
from kvrelay.percentiles import percentile
from kvrelay.planning.profile import Profile
from kvrelay.planning.step_cost_model import StepCostModel
from kvrelay.simulation.scenario import Delays, Scenario
from kvrelay.simulation.simulation import simulate
from kvrelay.types.workers import PoolName

# The context of OPT.
CONTEXT = 2048
# Layers and width of a model, for its KV bytes.
SHAPES = {"facebook/opt-13b": (40, 5120), "facebook/opt-66b": (64, 9216)}
# Bytes per second between the GPUs of a machine: NVLink of an A100, one way.
LINK = 300e9
ATTAINED = 90
# The decode times are those of batches below 95 sequences.
MAX_BATCH = 94


def kv_tokens(folder: Path, model: str, tp: int) -> int:
    """Reads the KV tokens of a worker of `tp` GPUs."""
    with (folder / "max_num_tokens.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            if (row["model"], row["tp"], row["pp"]) == (model, str(tp), "1"):
                return int(row["max_num_tokens"])
    raise typer.BadParameter(f"{model} has no measurements for {tp} GPUs.")


def profile(folder: Path, engine: str, model: str, tp: int) -> Profile:
    """Reads the times of a worker of `tp` GPUs."""
    file = folder / f"profiler-a100-80g.{engine}.json"
    times = json.loads(file.read_text())[model][str(tp)]
    # Milliseconds: constant, per token, per square of a prompt's tokens.
    constant, token, square = (one / 1000 for one in times["prefill"])
    # Milliseconds: constant, per token of context, per sequence.
    base, context, sequence = (one / 1000 for one in times["decoding_smallbs"])
    layers, width = SHAPES[model]
    kv_token_bytes = 2 * layers * width * 2
    costs = StepCostModel(
        prefill_base_s=constant,
        prefill_token_s=token,
        # n tokens attend to n / 2 tokens each on average.
        prefill_token_context_s=2 * square,
        decode_base_s=base,
        decode_sequence_s=sequence,
        decode_context_token_s=context,
        handoff_base_s=0.0,
        handoff_byte_s=1 / LINK,
        start_s=0.0,
        role_change_s=0.0,
        kind="measured",
    )
    return Profile(costs, kv_token_bytes, CONTEXT, 2**15)


def lengths(count: int, seed: int) -> list[tuple[int, int]]:
    """Draws prompts and answers: log-normal, with the means of ShareGPT in the paper (755.5 and
    200.3 tokens) once requests beyond the context of OPT are left out.
    """
    draw, found = random.Random(seed), list[tuple[int, int]]()
    while len(found) < count:
        prompt = max(4, round(draw.lognormvariate(6.9, 1.2)))
        answer = max(4, round(draw.lognormvariate(4.9, 1.0)))
        if prompt + answer < CONTEXT:
            found.append((prompt, answer))
    return found


def plan(drawn: list[tuple[int, int]], rate: float, seed: int) -> Iterator[PlannedRequest]:
    """Yields the requests at exponential intervals."""
    draw, at = random.Random(seed), 0.0
    for prompt, answer in drawn:
        yield PlannedRequest(at, None, tuple(draw.choices(range(2**15), k=prompt)), answer, 0)
        at += draw.expovariate(rate)


def sustains(
    scenario: Scenario, requests: list[PlannedRequest], ttft_s: float, itl_s: float
) -> bool:
    """Returns whether the cluster meets the objectives."""
    report = simulate(scenario, requests, {}, max_rows=10**9)
    ttft = sorted(row.ttft_s for row in report.answered if row.ttft_s is not None)
    itl = sorted(row.tpot_s for row in report.answered if row.tpot_s is not None)
    return percentile(ttft, ATTAINED) <= ttft_s and percentile(itl, ATTAINED) <= itl_s


def highest(meets: Callable[[float], bool], step: float) -> float:
    """Returns the highest multiple of `step` that is met, by bisection."""
    low, high = 0, 1
    while meets(high * step):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if meets(middle * step) else (low, middle)
    return low * step


def main(
    profiles: Annotated[Path, typer.Argument(help="Folder of the repository's measurements.")],
    model: Annotated[str, typer.Option(help="OPT model.")] = "facebook/opt-13b",
    tp_prefill: Annotated[int, typer.Option(help="GPUs of the prefill worker.")] = 2,
    tp_decode: Annotated[int, typer.Option(help="GPUs of the decode worker.")] = 1,
    tp_vllm: Annotated[int, typer.Option(help="GPUs of the colocated worker.")] = 1,
    ttft_ms: Annotated[float, typer.Option(help="Objective of the TTFT.")] = 250,
    itl_ms: Annotated[float, typer.Option(help="Objective of the mean time per token.")] = 100,
    chunk_tokens: Annotated[int, typer.Option(help="Largest step of the colocated worker.")] = 2048,
    num_requests: Annotated[int, typer.Option(help="Requests of a run.")] = 2000,
    step: Annotated[float, typer.Option(help="Resolution of the rate per GPU.")] = 0.05,
    export: Annotated[
        Path | None, typer.Option(help="Folder for the requests of each rate per GPU, JSON.")
    ] = None,
    seed: int = 0,
) -> None:
    """Print both rates and their ratio."""
    drawn = lengths(num_requests, seed)
    means = [sum(values) / num_requests for values in zip(*drawn, strict=True)]
    print(f"{num_requests} requests; {means[0]:.1f} tokens in, {means[1]:.1f} out on average")

    def cluster(engine: str, prefill_tp: int | None, decode_tp: int, chunk: int) -> Scenario:
        prefill = () if prefill_tp is None else (profile(profiles, engine, model, prefill_tp),)
        decode = profile(profiles, engine, model, decode_tp)
        memory = {
            pool: kv_tokens(profiles, model, tp) * decode.kv_token_bytes
            for pool, tp in (("prefill", prefill_tp or decode_tp), ("decode", decode_tp))
        }
        config = ClusterConfig.model_validate(
            {
                "kv": {"prefix_cache": False},
                "prefill": {
                    "chunk_tokens": chunk,
                    "replicas": len(prefill),
                    "kv": {"memory": memory["prefill"]},
                },
                "decode": {
                    "chunk_tokens": chunk,
                    "max_batch": MAX_BATCH,
                    "kv": {"memory": memory["decode"]},
                },
                "router": {"max_queue": 1_000_000, "local_below_tokens": 0},
                "slo": None,
            }
        )
        pools: dict[PoolName, tuple[Profile, ...]] = {"prefill": prefill, "decode": (decode,)}
        return Scenario(config, pools, delays=Delays(0.0, 0.0, 0.0))

    clusters = {
        "disaggregated": (
            cluster("distserve", tp_prefill, tp_decode, CONTEXT),
            tp_prefill + tp_decode,
        ),
        "colocated": (cluster("vllm", None, tp_vllm, chunk_tokens), tp_vllm),
    }
    rates = {}
    for name, (scenario, gpus) in clusters.items():

        def meets(rate: float, scenario: Scenario = scenario, gpus: int = gpus) -> bool:
            requests = list(plan(drawn, rate * gpus, seed))
            if export is not None:
                export.mkdir(parents=True, exist_ok=True)
                pairs = [
                    {"start_time": one.at, "prompt_len": prompt, "output_len": answer}
                    for one, (prompt, answer) in zip(requests, drawn, strict=True)
                ]
                (export / f"{gpus}-gpus-{rate:.2f}.json").write_text(json.dumps(pairs))
            return sustains(scenario, requests, ttft_ms / 1000, itl_ms / 1000)

        rates[name] = highest(meets, step)
        print(f"{name}, {gpus} GPUs: {rates[name]:.2f} requests/s per GPU")
    if rates["colocated"]:
        print(f"factor: {rates['disaggregated'] / rates['colocated']:.2f}")


if __name__ == "__main__":
    typer.run(main)
