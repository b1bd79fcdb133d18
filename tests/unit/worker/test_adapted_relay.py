"""Requests with LoRA adapters on real workers: the tokens of the merged model, on both paths, and
never the KV of other weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.adapters import greedy, merged, save_adapter, targets_of
from support.worker_harness import Session, workers

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import Code
from kvrelay.models.adapters.adapter_files import read_adapter
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker_messages import (
    Failed,
    HandedOff,
    Prefill,
    Refused,
    Reserve,
    Reserved,
    RunLocal,
    TokenBatch,
)

PROMPT = tuple(range(2, 63))
COUNT = 12


def config_of(*adapters: Path, **more: object) -> ClusterConfig:
    serve = [{"name": one.name, "path": str(one)} for one in adapters]
    return ClusterConfig.model_validate(
        {
            "model": {"dtype": "float32"},
            "adapters": {"serve": serve},
            "kv": {"block_size": 8, "memory": "4MiB"},
            "prefill": {"chunk_tokens": 16},
            "decode": {"chunk_tokens": 16, "max_batch": 4},
            **more,
        }
    )


def spec(request_id: str, adapter: Path | None, prompt: tuple[int, ...] = PROMPT) -> SequenceSpec:
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, seed=5, ignore_eos=True)
    found = "" if adapter is None else read_adapter(str(adapter), 64).adapter_id
    return SequenceSpec(request_id, 0, prompt, len(prompt), params, adapter=found)


async def relay(prefill: Session, decode: Session, one: SequenceSpec) -> tuple[list[int], int, int]:
    """The answer, and how many tokens the prefill and blocks the decode worker had in its cache."""
    await decode.send(Reserve(one, 10.0, "prefill-0"))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved), reserved
    await prefill.send(Prefill(one, reserved.target))
    first = await prefill.tokens()
    handed_off = await prefill.event()
    assert isinstance(handed_off, HandedOff), handed_off
    assert first.prefill is not None
    answer = [*first.token_ids, *await decode.answer()]
    return answer, first.prefill.cached_tokens, handed_off.handoff.cached_blocks


async def local(decode: Session, one: SequenceSpec) -> list[int]:
    await decode.send(RunLocal(one))
    return await decode.answer()


@pytest.fixture
def adapters(tiny_model: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path, Path]:
    """A base model and two adapters of it."""
    base = tiny_model("llama")
    one = save_adapter(tmp_path / "one", base, rank=4, seed=1)
    two = save_adapter(tmp_path / "two", base, rank=2, seed=2, targets=("q_proj", "v_proj"))
    return base, one, two


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
async def test_both_paths_give_the_tokens_of_the_merged_model(
    tiny_model: Callable[..., Path], tmp_path: Path, architecture: str
) -> None:
    base = tiny_model(architecture)
    adapter = save_adapter(tmp_path / "sql", base, targets=targets_of(architecture))
    expected = greedy(merged(base, adapter), PROMPT, COUNT)
    alone = greedy(merged(base, None), PROMPT, COUNT)
    assert expected != alone
    async with workers(base, config_of(adapter), "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        assert (await relay(prefill, decode, spec("a", adapter)))[0] == expected
        assert await local(decode, spec("b", adapter)) == expected
        assert (await relay(prefill, decode, spec("c", None)))[0] == alone
        assert await local(decode, spec("d", None)) == alone
        for info in await running.settled():
            assert info.load.integrity_ok, info.load.integrity_error


async def test_the_prefix_caches_keep_the_kv_of_different_weights_apart(
    adapters: tuple[Path, Path, Path],
) -> None:
    base, one, two = adapters
    order = (one, None, two)
    expected = {name: greedy(merged(base, name), PROMPT, COUNT) for name in order}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    async with workers(base, config_of(one, two), "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        for turn in range(2):
            for place, adapter in enumerate(order):
                request = spec(f"{turn}-{place}", adapter)
                tokens, cached_tokens, cached_blocks = await relay(prefill, decode, request)
                assert tokens == expected[adapter]
                # The first request of each finds nothing, and the second the whole prompt.
                assert (cached_tokens, cached_blocks) == ((0, 0), (56, 7))[turn]


@pytest.mark.long
async def test_a_worker_without_the_adapter_refuses_the_request(
    adapters: tuple[Path, Path, Path],
) -> None:
    base, one, two = adapters
    async with workers(base, config_of(one), "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        await decode.send(RunLocal(spec("a", two)))
        assert await decode.event() == Refused("a", 0, "adapter")
        await decode.send(Reserve(spec("b", two), 10.0, "prefill-0"))
        assert await decode.event() == Refused("b", 0, "adapter")
        await decode.send(Reserve(spec("c", one), 10.0, "prefill-0"))
        reserved = await decode.event()
        assert isinstance(reserved, Reserved)
        await prefill.send(Prefill(spec("c", two), reserved.target))
        assert await prefill.event() == Refused("c", 0, "adapter")
        (info,) = [one for one in await running.settled() if one.pool == "decode"]
        assert info.adapters == (spec("x", one).adapter,)


async def test_the_decode_worker_refuses_kv_of_another_adapter(
    adapters: tuple[Path, Path, Path],
) -> None:
    base, one, two = adapters
    async with workers(base, config_of(one, two), "prefill-0", "decode-0") as running:
        prefill, decode = await running.session("prefill-0"), await running.session("decode-0")
        for place, (promised, pushed) in enumerate([(one, two), (one, None), (None, one)]):
            await decode.send(Reserve(spec(f"{place}", promised), 10.0, "prefill-0"))
            reserved = await decode.event()
            assert isinstance(reserved, Reserved)
            await prefill.send(Prefill(spec(f"{place}", pushed), reserved.target))
            event = await prefill.event()
            while isinstance(event, TokenBatch):
                event = await prefill.event()
            assert isinstance(event, Failed), event
            assert event.code is Code.FAILED_PRECONDITION
            assert "the KV is computed with" in event.message


async def test_a_batch_mixes_adapters_and_speculates(adapters: tuple[Path, Path, Path]) -> None:
    base, one, two = adapters
    speculation = {"decode": {"speculation": {"tokens": 3}, "max_batch": 4, "chunk_tokens": 16}}
    config = config_of(one, two, **speculation)
    prompt = (7, 8, 9) * 8
    order = (one, None, two)
    async with workers(base, config, "decode-0") as running:
        decode = await running.session("decode-0")
        for place, adapter in enumerate(order):
            await decode.send(RunLocal(replace(spec(f"{place}", adapter, prompt))))
        answers: dict[str, list[int]] = {}
        while sum(map(len, answers.values())) < 3 * COUNT:
            event = await decode.event()
            assert isinstance(event, TokenBatch), event
            for item in event.sequences:
                answers.setdefault(item.request_id, []).extend(item.token_ids)
    for place, adapter in enumerate(order):
        assert answers[f"{place}"] == greedy(merged(base, adapter), prompt, COUNT)
