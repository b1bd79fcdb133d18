"""A small model with random weights and a real vocabulary, and answers that follow a grammar."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.tiny_models import build

from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling.sampler import SampleRequest
from kvrelay.engine.sequence_segment import Segment
from kvrelay.types.requests import Guidance, SamplingParams

DEMO = Path(__file__).parents[2] / "kvrelay" / "models" / "demo"
# As wide as the vocabulary of the demo model and some entries more, as padded models are.
VOCAB = 2100
EOS = 2
MAX_LEN = 768
PROMPT = (9, 104, 77, 523, 5, 31, 8)


def guided_model(folder: Path, **overrides: Any) -> Path:
    """Saves a model with the demo model's tokenizer and returns its folder."""
    settings = {"vocab_size": VOCAB, "eos_token_id": EOS, "max_position_embeddings": MAX_LEN}
    build("llama", folder, **settings | overrides)
    shutil.copy(DEMO / "tokenizer.json", folder)
    return folder


def json_schema(schema: Mapping[str, Any]) -> Guidance:
    return Guidance("json_schema", json.dumps(schema))


def params(guidance: Guidance, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 1, "guidance": guidance} | options)


def request(
    runner: ModelRunner, sampling: SamplingParams, token_ids: list[int], prompt_len: int
) -> SampleRequest:
    """The next token of a sequence that has just arrived."""
    matcher = None
    if sampling.guidance is not None:
        matcher = runner.grammars.open(sampling.guidance, token_ids, prompt_len, "")
    return SampleRequest(sampling, token_ids, prompt_len, runner.eos_token_ids, matcher)


def answer(
    runner: ModelRunner,
    sampling: SamplingParams,
    *,
    emitted: tuple[int, ...] = (),
    max_tokens: int = 600,
) -> tuple[int, ...]:
    """The tokens of an answer to PROMPT that continues `emitted`, up to its end."""
    tokens, computed = [*PROMPT, *emitted], 0
    sample = request(runner, sampling, tokens, len(PROMPT))
    blocks = range(runner.layout.blocks_for(MAX_LEN))
    while len(tokens) < len(PROMPT) + max_tokens:
        ((sampled,),) = runner.run([Segment(tokens[computed:], computed, blocks, sample)])
        computed = len(tokens)
        tokens.append(sampled.token_id)
        if sampled.token_id in runner.eos_token_ids:
            break
    return tuple(tokens[len(PROMPT) :])
