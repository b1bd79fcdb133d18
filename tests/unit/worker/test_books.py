"""A worker whose books do not add up says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.worker_harness import workers

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.kvcache.block_pool import BlockPool, IntegrityError
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker_messages import RunLocal

CONFIG = ClusterConfig.model_validate({"kv": {"block_size": 8, "memory": "4MiB"}})


async def test_a_worker_whose_books_are_off_says_so(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(pool: BlockPool) -> None:
        raise IntegrityError("blocks lost: [3]")

    monkeypatch.setattr(BlockPool, "check_integrity", off)
    async with workers(tiny_model("llama"), CONFIG, "decode-0") as running, asyncio.timeout(30):
        decode = await running.session("decode-0")
        tokens = (3, 4, 5)
        await decode.send(
            RunLocal(
                SequenceSpec("a", 0, tokens, len(tokens), SamplingParams(seed=1, max_tokens=3))
            )
        )
        await decode.answer()
        while True:
            (info,) = await running.registry.workers()
            if not info.load.integrity_ok:
                break
            await asyncio.sleep(0.05)
        assert info.load.integrity_error == "blocks lost: [3]"
