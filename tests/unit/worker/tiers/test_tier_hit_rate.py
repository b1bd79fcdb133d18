"""Conversations whose KV is four times the memory find as much with a tier as with all memory."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulation.toy_engine import POISON, answer
from support.tiers_first import read_always
from support.toy_workers import toy_config, toy_workers

from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.tiers import tier_fetcher
from kvrelay.worker.tiers.tier_cost import TierCost
from kvrelay.worker.tiers.tier_store import TierStore
from kvrelay.worker_messages import RunLocal

CONVERSATIONS, TURNS, BLOCKS = 12, 5, 200
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, seed=5, ignore_eos=True)


async def hit_rate(num_blocks: int, tiers: list[dict[str, Any]], stores: list[TierStore]) -> float:
    """Cached tokens per prompt token, with the conversations in turn: the worst order for LRU."""
    rng = random.Random(3)
    talks = [[rng.randrange(1, POISON) for _ in range(16)] for _ in range(CONVERSATIONS)]
    asked = cached = 0
    async with toy_workers(toy_config(tiers), num_blocks, "decode-0") as running:
        session = await running.session("decode-0")
        for turn in range(TURNS):
            for number, tokens in enumerate(talks):
                tokens += [rng.randrange(1, POISON) for _ in range(5)]
                prompt = tuple(tokens)
                one = SequenceSpec(f"{turn}-{number}", 0, prompt, len(prompt), PARAMS)
                await session.send(RunLocal(one))
                first = await session.tokens()
                got = [*first.token_ids, *await session.answer()]
                assert tuple(got) == answer(prompt, PARAMS)
                assert first.prefill is not None
                asked, cached = asked + len(prompt), cached + first.prefill.cached_tokens
                tokens += got
                # The disk is not what is tested here.
                for store in stores:
                    await store.flush(30.0)
    return cached / asked


async def test_a_tier_finds_what_memory_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_always(monkeypatch)
    monkeypatch.setattr(tier_fetcher, "_SHORTEST_S", 30.0)
    monkeypatch.setattr(tier_fetcher, "_LONGEST_S", 60.0)
    stores: list[TierStore] = []
    run = TierStore.run

    async def remember(store: TierStore) -> None:
        stores.append(store)
        await run(store)

    monkeypatch.setattr(TierStore, "run", remember)
    tiers = [{"kind": "disk", "path": str(tmp_path / "kv"), "size": 2 * BLOCKS * 4096}]
    async with asyncio.timeout(300):
        unlimited = await hit_rate(2 * BLOCKS, [], stores)
        none = await hit_rate(BLOCKS // 4, [], stores)
        disk = await hit_rate(BLOCKS // 4, tiers, stores)
    assert stores
    assert unlimited - none > 0.3, "memory is no limit here"
    assert unlimited - disk <= 0.03, (unlimited, none, disk)


async def test_answers_of_one_token_tell_how_fast_prompts_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this rate, a tier would always count as faster."""
    computed: list[int] = []
    monkeypatch.setattr(TierCost, "add_compute", lambda _, tokens, seconds: computed.append(tokens))
    tiers = [{"kind": "disk", "path": str(tmp_path / "kv"), "size": BLOCKS * 4096}]
    async with (
        asyncio.timeout(60),
        toy_workers(toy_config(tiers), BLOCKS, "decode-0") as running,
    ):
        session = await running.session("decode-0")
        one = SequenceSpec("one", 0, tuple(range(1, 31)), 30, replace(PARAMS, max_tokens=1))
        await session.send(RunLocal(one))
        assert (await session.tokens()).finish_reason == "length"
    assert computed == [30]
