"""The log-probabilities of a prompt on real workers: those of transformers' model, on each path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.worker_harness import Session, workers
from transformers import AutoModelForCausalLM

from decode_worker.scheduler import DecodeScheduler
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.engine.sampling.prompt_scores import PromptScores
from kvrelay.types.requests import PromptLogprobs, SamplingParams, SequenceSpec
from kvrelay.worker.scheduler import SCORED_TOKENS
from kvrelay.worker.sequence import Sequence as WorkerSequence
from kvrelay.worker_messages import HandedOff, Prefill, Reserve, Reserved, RunLocal, SequenceTokens
from prefill_worker.scheduler import PrefillScheduler

CONFIG = ClusterConfig.model_validate(
    {
        "model": {"dtype": "float32"},
        "kv": {"block_size": 8, "memory": "4MiB"},
        "prefill": {"chunk_tokens": 16},
        "decode": {"chunk_tokens": 24, "max_batch": 4},
    }
)
PROMPT = tuple(range(2, 63))


def spec(
    request_id: str, count: int | None, token_ids: Sequence[int] = PROMPT, emitted: int = 0
) -> SequenceSpec:
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=count)
    return SequenceSpec(request_id, 0, tuple(token_ids), len(token_ids) - emitted, sampling)


def expected(model: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """[P - 1, V]"""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        return network(torch.tensor([list(token_ids)])).logits[0, :-1].log_softmax(dim=-1)


def check(found: PromptLogprobs | None, wanted: torch.Tensor, token_ids: Sequence[int]) -> None:
    assert found is not None
    count = len(found.top_ids) // max(1, len(found))
    own = wanted.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    assert torch.allclose(torch.tensor(list(found.logprobs)), own, atol=1e-4)
    values, _ = wanted.topk(count)
    assert torch.allclose(torch.tensor(list(found.top_logprobs)), values.flatten(), atol=1e-4)
    for place, one in enumerate(found):
        for token_id, logprob in one.top:
            assert float(wanted[place, token_id]) == pytest.approx(logprob, abs=1e-4)


async def local(decode: Session, one: SequenceSpec) -> SequenceTokens:
    await decode.send(RunLocal(one))
    first = await decode.tokens()
    assert first.finish_reason is None
    await decode.answer()
    return first


async def relayed(prefill: Session, decode: Session, one: SequenceSpec) -> SequenceTokens:
    await decode.send(Reserve(one, 10.0, "prefill-0"))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved), reserved
    await prefill.send(Prefill(one, reserved.target))
    first = await prefill.tokens()
    assert isinstance(await prefill.event(), HandedOff)
    second = await decode.tokens()
    assert second.prompt_logprobs is None, "they are sent once"
    await decode.answer()
    return first


async def test_both_paths_give_those_of_the_model(tiny_model: Callable[..., Path]) -> None:
    """Also of a prompt whose KV the workers hold already."""
    wanted = expected(tiny_model(), PROMPT)
    async with workers(tiny_model(), CONFIG, "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        answers = []
        for number, count in enumerate((0, 3, 20)):
            for one in (
                await local(decode, spec(f"local-{number}", count)),
                await relayed(prefill, decode, spec(f"relayed-{number}", count)),
            ):
                scores = one.prompt_logprobs
                check(scores, wanted, PROMPT)
                assert scores is not None
                assert len(scores.top_ids) == count * (len(PROMPT) - 1)
                answers.append(one.token_ids)
        plain = await local(decode, spec("plain", None))
        assert plain.prompt_logprobs is None
        assert set(answers) == {plain.token_ids}


async def test_a_prompt_of_one_token_has_none(tiny_model: Callable[..., Path]) -> None:
    async with workers(tiny_model(), CONFIG, "decode-0") as running:
        first = await local(await running.session("decode-0"), spec("short", 2, PROMPT[:1]))
        scores = first.prompt_logprobs
        assert scores is not None
        assert list(scores) == []


async def test_an_attempt_that_continues_an_answer_sends_none(
    tiny_model: Callable[..., Path],
) -> None:
    async with workers(tiny_model(), CONFIG, "decode-0") as running:
        one = replace(spec("later", 2, emitted=3), attempt=1)
        first = await local(await running.session("decode-0"), one)
        assert first.index == 3
        assert first.prompt_logprobs is None


@pytest.mark.parametrize("kind", [PrefillScheduler, DecodeScheduler])
@pytest.mark.parametrize("block_size", [8, 256])
def test_a_step_scores_few_tokens(
    kind: type[PrefillScheduler | DecodeScheduler], block_size: int
) -> None:
    """Each has the logits of the whole vocabulary. A chunk still ends with a full block."""
    cache = KvCache(200, block_size)
    scheduler = kind(cache, chunk_tokens=512)
    one = spec("long", 1, [7] * 1000)
    scores = PromptScores(one.token_ids, 1)
    scheduler.add(WorkerSequence(one, 0.0, BlockHasher(block_size), scores=scores))
    chunks = []
    while batch := scheduler.next(0.0):
        chunks.append(batch[0].num_tokens)
        scheduler.complete(batch)
        if batch[0].sample:
            break
    assert sum(chunks) == 1000
    assert max(chunks) == max(SCORED_TOKENS, block_size)
