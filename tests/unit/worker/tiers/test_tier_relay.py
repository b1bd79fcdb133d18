"""Real workers with tiers: the same tokens as without, wherever the KV came from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiers_first import read_always
from support.worker_harness import Session, Workers, load_of, workers

from kvrelay.config.schema import ClusterConfig
from kvrelay.types.requests import PrefillTimings, SamplingParams, SequenceSpec
from kvrelay.types.workers import TierLoad
from kvrelay.worker.tiers import tier_fetcher
from kvrelay.worker_messages import HandedOff, Prefill, Reserve, Reserved, RunLocal

SIZE = 16
# Of 24 blocks of the float32 model; a sequence of these tests takes 5.
MEMORY = "160KiB"
NEW_TOKENS = 12


def config(tiers: list[dict[str, Any]], **kv: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": {"dtype": "float32"},
            "kv": {"block_size": SIZE, "memory": MEMORY, "tiers": tiers, **kv},
            "prefill": {"chunk_tokens": 32},
            "decode": {"chunk_tokens": 32},
        }
    )


def disk(path: Path, size: str = "4MiB") -> dict[str, Any]:
    return {"kind": "disk", "path": str(path), "size": size}


def prompt(number: int) -> tuple[int, ...]:
    return tuple(2 + (7 * number + 3 * place + place * place) % 120 for place in range(61))


def spec(request_id: str, token_ids: tuple[int, ...], salt: str = "", tenant: str = "") -> Any:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, seed=5, ignore_eos=True)
    return SequenceSpec(request_id, 0, token_ids, len(token_ids), params, salt, tenant=tenant)


@pytest.fixture(autouse=True)
def always_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes sooner than any file is opened, and this machine may be busy."""
    monkeypatch.setattr(tier_fetcher, "_SHORTEST_S", 30.0)
    monkeypatch.setattr(tier_fetcher, "_LONGEST_S", 60.0)
    read_always(monkeypatch)


async def local(decode: Session, one: SequenceSpec) -> tuple[list[int], PrefillTimings]:
    await decode.send(RunLocal(one))
    first = await decode.tokens()
    assert first.prefill is not None
    return [*first.token_ids, *await decode.answer()], first.prefill


async def relay(
    prefill: Session, decode: Session, one: SequenceSpec
) -> tuple[list[int], PrefillTimings]:
    await decode.send(Reserve(one, 10.0, "prefill-0"))
    reserved = await decode.event()
    assert isinstance(reserved, Reserved), reserved
    await prefill.send(Prefill(one, reserved.target))
    first = await prefill.tokens()
    assert isinstance(await prefill.event(), HandedOff)
    assert first.prefill is not None
    return [*first.token_ids, *await decode.answer()], first.prefill


async def tier(session: Session, kind: str = "disk") -> TierLoad:
    (found,) = [one for one in (await load_of(session.info)).tiers if one.kind == kind]
    return found


async def stored(session: Session, blocks: int, kind: str = "disk") -> TierLoad:
    """The tier once it has stored so many blocks."""
    async with asyncio.timeout(20):
        while (found := await tier(session, kind)).stored < blocks:
            await asyncio.sleep(0.02)
    return found


async def opened(session: Session, blocks: int) -> None:
    """Waits until a new worker has found so many blocks on the disk: prompts do not wait for it."""
    async with asyncio.timeout(20):
        while (await tier(session)).blocks < blocks:
            await asyncio.sleep(0.02)


async def books_are_right(running: Workers) -> None:
    for info in await running.settled():
        assert info.load.integrity_ok, info.load.integrity_error


async def answers_without_tiers(model: Path, count: int) -> list[list[int]]:
    async with workers(model, config([], memory="4MiB"), "decode-0") as running:
        decode = await running.session("decode-0")
        return [(await local(decode, spec(f"p{n}", prompt(n))))[0] for n in range(count)]


async def test_evicted_blocks_come_back_from_disk(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    expected = await answers_without_tiers(tiny_model(), 8)
    async with workers(tiny_model(), config([disk(tmp_path / "kv")]), "decode-0") as running:
        decode = await running.session("decode-0")
        for round_ in range(3):
            for number in range(8):
                tokens, timings = await local(decode, spec(f"{round_}-{number}", prompt(number)))
                assert tokens == expected[number]
                if round_:
                    assert timings.cached_tokens == 48
            if not round_:
                # All that is not in memory any more.
                await stored(decode, 8 * 4 - 24)
        found = await tier(decode)
        assert found.hits, found
        assert not found.errors, found
        assert timings.fetched_from == "disk"
        await books_are_right(running)


async def test_kv_of_other_numbers_stays_apart(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Two models of one cluster may have the same files and the same tier, and an operator may
    change `weights` between two starts.
    """
    made = config([disk(tmp_path / "kv")])
    rounded = made.model_copy(update={"decode": made.decode.model_copy(update={"weights": "int8"})})
    for weights, cached in ((rounded, 0), (made, 0), (rounded, 48), (made, 48)):
        async with workers(tiny_model(), weights, "decode-0") as running:
            decode = await running.session("decode-0")
            if cached:
                await opened(decode, 4)
            _, timings = await local(decode, spec("first", prompt(0)))
            assert timings.cached_tokens == cached
            for number in range(1, 8):
                await local(decode, spec(f"{number}", prompt(number)))
            if not cached:
                await stored(decode, 4)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["auto", "int8"])
async def test_blocks_from_disk_are_handed_over(
    tiny_model: Callable[..., Path], tmp_path: Path, dtype: str
) -> None:
    """The prefill worker reads what it evicted and hands it over. The decode worker of the second
    round has none of it.
    """
    answers: list[list[int]] = []
    for tiers in ([], [disk(tmp_path / "kv")]):
        cluster = config([], dtype=dtype).model_dump(mode="json")
        cluster["decode"]["kv"]["memory"] = 8 * 2**20
        cluster["decode"]["kv"]["tiers"] = []
        cluster["kv"]["tiers"] = tiers
        # An int8 block is smaller.
        cluster["kv"]["memory"] = 160 * 1024 if dtype == "auto" else 48 * 1024
        made = ClusterConfig.model_validate(cluster)
        names = "prefill-0", "decode-0", "decode-1"
        async with workers(tiny_model(), made, *names) as running:
            prefill, *decoders = [await running.session(name) for name in names]
            fetched = 0
            for round_, decode in enumerate(decoders):
                for number in range(16):
                    one = spec(f"{round_}-{number}", prompt(number))
                    tokens, timings = await relay(prefill, decode, one)
                    fetched += timings.fetched_tokens
                    answers.append(tokens)
                if tiers and not round_:
                    await stored(prefill, 8)
            assert bool(fetched) == bool(tiers)
            await books_are_right(running)
    assert answers[:32] == answers[32:]


async def test_what_a_worker_stored_is_there_after_its_restart(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    expected = await answers_without_tiers(tiny_model(), 4)
    made = config([disk(tmp_path / "kv")])
    async with workers(tiny_model(), made, "decode-0") as running:
        decode = await running.session("decode-0")
        for number in range(4):
            await local(decode, spec(f"a{number}", prompt(number)))
        await stored(decode, 4 * 4)
    async with workers(tiny_model(), made, "decode-0") as running:
        decode = await running.session("decode-0")
        await opened(decode, 4 * 4)
        for number in range(4):
            tokens, timings = await local(decode, spec(f"b{number}", prompt(number)))
            assert tokens == expected[number]
            assert timings.fetched_tokens == 48
        # Another tenant's salt finds nothing of it.
        _, timings = await local(decode, spec("c", prompt(0), salt="other"))
        assert timings.cached_tokens == 0


async def test_workers_of_one_host_read_each_others_files(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    expected = await answers_without_tiers(tiny_model(), 4)
    made = config([disk(tmp_path / "kv")])
    async with workers(tiny_model(), made, "decode-0", "decode-1") as running:
        first, second = [await running.session(name) for name in ("decode-0", "decode-1")]
        for number in range(8):
            await local(first, spec(f"a{number}", prompt(number)))
        await stored(first, 8)
        present = {file.name for file in (tmp_path / "kv").rglob("*.kv")}
        fetched = 0
        for number in range(4):
            tokens, timings = await local(second, spec(f"b{number}", prompt(number)))
            assert tokens == expected[number]
            fetched += timings.fetched_tokens
        assert fetched >= 48, present
        assert len({path.parent.parent.parent for path in (tmp_path / "kv").rglob("*.kv")}) <= 2
        await books_are_right(running)


async def test_a_host_tier_gives_to_the_disk_what_it_evicts(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    expected = await answers_without_tiers(tiny_model(), 10)
    host = {"kind": "host", "size": "64KiB"}
    made = config([host, disk(tmp_path / "kv")])
    async with workers(tiny_model(), made, "decode-0") as running:
        decode = await running.session("decode-0")
        sources = set()
        for round_ in range(2):
            for number in range(10):
                tokens, timings = await local(decode, spec(f"{round_}-{number}", prompt(number)))
                assert tokens == expected[number]
                sources.add(timings.fetched_from)
            if not round_:
                await stored(decode, 1)
        found = await tier(decode, "host")
        assert found.stored > found.blocks
        assert found.used_bytes <= 64 * 1024
        assert "disk" in sources
        await books_are_right(running)
