"""Acceptance and speed of speculation at batch 1: the same answers without speculation, with
n-grams, with suffix decoding and with a draft model, answer by answer in alternation.

    python benchmarks/draft_speculation.py --model demo --draft FOLDER --tokens 4
    python benchmarks/draft_speculation.py --temperature 0.7 --rounds 20

At temperature 0, each round has the same answers, which suffix decoding knows from the round
before. With a temperature, answers to a prompt resemble each other.

Times are processor time of this process, with one thread. On a busy machine only the ratios mean
anything. The answers must be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from array import array
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from decode_worker.draft_model import DraftLimits, DraftModelProposer
from decode_worker.draft_passes import DraftRequest, run_draft_passes
from decode_worker.drafter import Drafter
from decode_worker.scheduler import DecodeScheduler
from kvrelay.config.pools import SpeculationConfig
from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.sampler import SampleRequest
from kvrelay.engine.sequence_segment import Segment
from kvrelay.models import resolve_model
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.sequence import Sequence, Work

BLOCK_SIZE = 32
KV_BYTES = 2**27
PROMPTS = (
    "<s>Once upon a time",
    "<s><|user|>Tell me a story about a fox.</s><|assistant|>",
    "<s>There was once a brave little mouse named Omar, who",
    "<s><|user|>Please tell me a story.</s><|assistant|>",
    "<s>Story 1. There was once a",
    "<s><|user|>Count to 8.</s><|assistant|>",
)


@dataclass(slots=True)
class Arm:
    """One way to answer, with its sums."""

    name: str
    scheduler: DecodeScheduler
    cache: KvCache
    seconds: float = 0.0
    # Of the draft model, within `seconds`.
    draft_seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


class Bench:
    """The served model, and the ways to answer with it."""

    def __init__(self, runner: ModelRunner, draft: ModelRunner | None, tokens: int) -> None:
        self._runner = runner
        self.arms = [
            self._arm("plain", None, None),
            self._arm("ngram", tokens, None),
            self._arm("suffix", tokens, None),
        ]
        if draft is not None:
            self.arms.append(self._arm("draft", tokens, draft))

    def _arm(self, name: str, tokens: int | None, draft: ModelRunner | None) -> Arm:
        cache = KvCache(self._runner.num_blocks, BLOCK_SIZE, prefix_cache=False)
        proposer = None
        if draft is not None:
            limits = DraftLimits(draft.num_blocks, BLOCK_SIZE, draft.max_model_len, tokens or 1)

            async def run(requests: list[DraftRequest]) -> list[tuple[int, ...]]:
                began = time.process_time()
                drafts = run_draft_passes(draft, requests)
                arm.draft_seconds += time.process_time() - began
                return drafts

            proposer = DraftModelProposer(limits, run)
        drafter = None
        if tokens is not None:
            kind = "suffix" if name == "suffix" else "ngram"
            config = SpeculationConfig(kind=kind, tokens=tokens)
            drafter = Drafter(config, self._runner.max_model_len, proposer)
        arm = Arm(name, DecodeScheduler(cache, 512, drafter), cache)
        return arm

    async def answer(self, arm: Arm, spec: SequenceSpec) -> tuple[int, ...]:
        """Answers as a decode worker does. The prompt does not count."""
        runner, began = self._runner, 0.0
        sequence = Sequence(spec, 0.0, BlockHasher(BLOCK_SIZE))
        arm.scheduler.add(sequence)
        while True:
            await arm.scheduler.prepare()
            batch = arm.scheduler.next(0.0)
            (draws,) = runner.run([segment(work, runner) for work in batch])
            arm.scheduler.complete(batch)
            (work,) = batch
            finish = None
            for index, draw in enumerate(draws):
                if index:
                    sequence.advance(arm.cache, 1)
                finish = sequence.append(draw.token_id, runner.eos_token_ids, runner.max_model_len)
                if finish is not None:
                    break
            if draws and not began:
                began = time.process_time()
            elif draws:
                arm.steps += 1
                arm.drafted += len(work.draft)
                arm.accepted += len(draws) - 1
            if finish is not None:
                arm.seconds += time.process_time() - began
                arm.tokens += sequence.num_emitted - 1
                arm.scheduler.remove(sequence)
                return tuple(sequence.tokens[spec.prompt_len :])


def segment(work: Work, runner: ModelRunner) -> Segment:
    """The work as the step loop gives it to the engine."""
    sequence, draft = work.sequence, array("q", work.draft)
    start, end = sequence.num_computed, sequence.num_computed + work.num_tokens
    sample = None
    if work.sample:
        tokens = sequence.tokens + draft
        params, length = sequence.spec.sampling, sequence.spec.prompt_len
        sample = SampleRequest(params, tokens, length, runner.eos_token_ids)
    token_ids = sequence.tokens[start:end] + draft
    return Segment(token_ids, start, sequence.blocks, sample, num_draft=len(draft))


def with_inert_layers(path: str, count: int, out: Path) -> str:
    """Writes the model with `count` more layers that add nothing to its results. So a larger model
    gives the same answers, at the cost of its size.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    config = model.config
    config.num_hidden_layers += count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types + config.layer_types[-1:] * count
    larger = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    larger.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for layer in larger.model.layers[-count:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    larger.save_pretrained(out)
    return str(out)


def load(path: str, options: argparse.Namespace) -> ModelRunner:
    """Loads a model as a worker does."""
    runner = ModelRunner.load(
        resolve_model(path),
        block_size=BLOCK_SIZE,
        kv_bytes=KV_BYTES,
        max_model_len=options.max_tokens + 256,
        threads=1,
        dtype=options.dtype,
        kernels=options.kernels,
    )
    runner.capture_decode_steps(8, 1.0)
    return runner


def main() -> None:
    """Prints one line of JSON per way to answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft", default=None, help="Folder of the draft model.")
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument(
        "--inert-layers",
        type=int,
        default=0,
        help="Layers to add to a Llama model that change no result.",
    )
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--kernels", default="auto", choices=["auto", "torch"])
    options = parser.parse_args()
    draft = None if options.draft is None else load(options.draft, options)
    with tempfile.TemporaryDirectory() as folder:
        model = resolve_model(options.model)
        if options.inert_layers:
            model = with_inert_layers(model, options.inert_layers, Path(folder))
        runner = load(model, options)
    asyncio.run(compare(Bench(runner, draft, options.tokens), options))


async def compare(bench: Bench, options: argparse.Namespace) -> None:
    """Answers each prompt in each way, and prints the sums. The first round warms up."""
    tokenizer = Tokenizer.from_file(str(Path(resolve_model(options.model)) / "tokenizer.json"))
    differ = 0
    for number in range(options.rounds + 1):
        for prompt in PROMPTS:
            ids = tuple(tokenizer.encode(prompt, add_special_tokens=False).ids)
            params = SamplingParams(
                temperature=options.temperature,
                seed=number,
                max_tokens=options.max_tokens,
            )
            spec = SequenceSpec(prompt, 0, ids, len(ids), params)
            answers = {await bench.answer(arm, spec) for arm in bench.arms}
            differ += len(answers) > 1
        if not number:
            for arm in bench.arms:
                arm.seconds = arm.draft_seconds = 0.0
                arm.tokens = arm.steps = arm.drafted = arm.accepted = 0
    plain = bench.arms[0]
    for arm in bench.arms:
        figures = {
            "kind": arm.name,
            "tokens": arm.tokens,
            "tokens_per_step": round(arm.tokens / arm.steps, 2),
            "acceptance": round(arm.accepted / arm.drafted, 3) if arm.drafted else None,
            "speed_up": round(plain.seconds / arm.seconds * arm.tokens / plain.tokens, 2),
            "draft_share": round(arm.draft_seconds / arm.seconds, 2),
            "ms_per_token": round(1e3 * arm.seconds / arm.tokens, 3),
            "answers_that_differ": differ,
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
