"""Real workers that share stores: the same tokens as without, whatever happens to the stores."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.stores import StoreProcess, store
from support.tiers_first import read_always
from support.toy_client import ToyClient, books_are_right, prompt
from support.toy_workers import toy_config, toy_workers
from support.worker_harness import workers

from kvrelay.config.schema import ClusterConfig
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.worker.tiers import store_link, tier_fetcher
from kvrelay.worker_messages import RunLocal

BLOCKS = 40


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy computes sooner than any store answers, and this machine may be busy."""
    read_always(monkeypatch)
    monkeypatch.setattr(tier_fetcher, "_SHORTEST_S", 30.0)
    monkeypatch.setattr(tier_fetcher, "_LONGEST_S", 60.0)
    for name in ("_FIND_S", "_SILENCE_S", "_PUT_S", "_GET_S", "_STATUS_S"):
        monkeypatch.setattr(store_link, name, 30.0)
    monkeypatch.setattr(store_link, "_PAUSE_S", 0.05)
    monkeypatch.setattr(store_link, "_LONGEST_PAUSE_S", 0.1)


def stores(*addresses: str) -> dict[str, Any]:
    return {"kind": "remote", "addresses": addresses}


class Client(ToyClient):
    kind = "remote"
    seconds = 60

    async def ask_all(self, count: int = 12, tenant: str = "") -> dict[str, int]:
        """Fetched tokens of all prompts, by where they came from."""
        found: dict[str, int] = {}
        for number in range(count):
            timings = await self.ask(prompt(number), tenant)
            if timings.fetched_tokens:
                source = timings.fetched_from
                found[source] = found.get(source, 0) + timings.fetched_tokens
        return found


async def opened(*clients: Client) -> None:
    for one in clients:
        await one.until(lambda tier: not tier.skipped)


@pytest.mark.long
async def test_two_workers_share_stores_across_a_restart() -> None:
    async with store() as (first, _), store() as (second, _):
        made = toy_config([stores(first, second)])
        async with toy_workers(made, BLOCKS, "decode-0", drains=True) as running:
            one = await Client.of(running)
            await opened(one)
            assert not await one.ask_all()
            found = await one.until(lambda tier: tier.blocks > 60)
            assert found.used_bytes > 0
            assert found.size_bytes == 2 * 2**24
        # Other processes, which have computed nothing.
        async with toy_workers(made, BLOCKS, "decode-0", "decode-1") as running:
            clients = [await Client.of(running, name) for name in ("decode-0", "decode-1")]
            await opened(*clients)
            for number, one in enumerate(clients):
                assert (await one.ask_all())["remote"] >= 12 * 32
                assert (await one.tier()).hits
                # Another tenant's salt finds nothing.
                assert not await one.ask_all(3, tenant=f"other {number}")
            await books_are_right(running)


async def test_another_worker_finds_blocks_while_most_memory_is_free() -> None:
    async with store() as (address, held):
        made = toy_config([stores(address)])
        async with toy_workers(made, 100 * BLOCKS, "decode-0", "decode-1") as running:
            one, other = [await Client.of(running, name) for name in ("decode-0", "decode-1")]
            await opened(one, other)
            await one.ask(prompt(0))
            await one.until(lambda tier: tier.stored > 0)
            async with asyncio.timeout(60):
                while len(held) < len(prompt(0)) // made.kv.block_size:
                    await asyncio.sleep(0.01)
            assert (await other.ask(prompt(0))).fetched_from == "remote"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.sweep(2)
async def test_a_store_is_killed_again_and_again_under_load(seed: int) -> None:
    rng = random.Random(seed)
    processes = [StoreProcess("--size", "8MiB") for _ in range(2)]
    try:
        made = toy_config([stores(*(one.address for one in processes))])
        async with toy_workers(made, BLOCKS, "decode-0", "decode-1") as running:
            clients = [await Client.of(running, name) for name in ("decode-0", "decode-1")]
            await opened(*clients)
            fetched = 0

            async def load(one: Client) -> None:
                nonlocal fetched
                for _ in range(150):
                    fetched += (await one.ask(prompt(rng.randrange(20)))).fetched_tokens

            async def kill() -> None:
                for _ in range(3):
                    number = rng.randrange(2)
                    port = int(processes[number].address.rpartition(":")[2])
                    before = fetched
                    async with asyncio.timeout(60):
                        while fetched < before + 100 and not all(one.done() for one in loads):
                            await asyncio.sleep(0.005)
                    await asyncio.to_thread(processes[number].close)
                    processes[number] = await asyncio.to_thread(
                        StoreProcess, "--size", "8MiB", port=port
                    )

            async with asyncio.TaskGroup() as tasks:
                loads = [tasks.create_task(load(one)) for one in clients]
                tasks.create_task(kill())
            assert fetched
            # The loss was noticed, and the stores are used again.
            for one in clients:
                found = await one.until(lambda tier: not tier.skipped)
                assert found.errors
                assert "127.0.0.1" in found.error
            await books_are_right(running)
    finally:
        for one in processes:
            one.close()


async def test_blocks_go_to_the_disk_and_to_the_stores(tmp_path: Path) -> None:
    async with store() as (address, held):
        disk = {"kind": "disk", "path": str(tmp_path / "kv"), "size": 500 * 4096}
        made = toy_config([disk, stores(address)])
        async with toy_workers(made, BLOCKS, "decode-0", drains=True) as running:
            one = await Client.of(running)
            await opened(one)
            await one.ask_all()
            await one.until(lambda tier: tier.stored > 30, "disk")
            # What is near is taken from there.
            assert set(await one.ask_all()) == {"disk"}
        assert len(held) > 60
        # Another host has the stores only.
        made = toy_config([stores(address)])
        async with toy_workers(made, BLOCKS, "decode-1") as running:
            one = await Client.of(running, "decode-1")
            await opened(one)
            assert set(await one.ask_all()) == {"remote"}
            await books_are_right(running)


async def test_a_prefix_that_is_partly_near_is_read_from_both(tmp_path: Path) -> None:
    """The disk lost some files; the stores have them."""
    path = tmp_path / "kv"
    async with store() as (address, _):
        disk = {"kind": "disk", "path": str(path), "size": 500 * 4096}
        made = toy_config([disk, stores(address)])
        async with toy_workers(made, BLOCKS, "decode-0", drains=True) as running:
            one = await Client.of(running)
            await opened(one)
            await one.ask_all()
        files = sorted(path.rglob("*.kv"))
        assert len(files) > 60
        for file in files[::3]:
            file.unlink()
        async with toy_workers(made, BLOCKS, "decode-0") as running:
            one = await Client.of(running)
            await opened(one)
            await one.until(lambda tier: tier.blocks > 0, "disk")
            found = await one.ask_all()
            assert sum(found.values()) == 12 * 40
            assert found["remote"]
            disk_hits = (await one.tier("disk")).hits
            assert disk_hits
            assert (await one.tier("remote")).hits
            await books_are_right(running)


async def test_workers_serve_without_any_store() -> None:
    dead = StoreProcess()
    dead.close()
    async with toy_workers(toy_config([stores(dead.address)]), BLOCKS, "decode-0") as running:
        one = await Client.of(running)
        assert not await one.ask_all()
        found = await one.until(lambda tier: tier.errors > 1)
        assert dead.address in found.error
        assert found.skipped == 1
        assert not found.stored
        await books_are_right(running)


async def test_a_tampered_store_gives_no_wrong_token() -> None:
    async with store() as (address, held):
        made = toy_config([stores(address)])
        async with toy_workers(made, BLOCKS, "decode-0", drains=True) as running:
            one = await Client.of(running)
            await opened(one)
            await one.ask_all()
        for entry in held._entries.values():
            # The last byte of the KV itself.
            record = bytearray(entry.record)
            record[-1] ^= 1
            object.__setattr__(entry, "record", bytes(record))
        async with toy_workers(made, BLOCKS, "decode-0") as running:
            one = await Client.of(running)
            await opened(one)
            assert not await one.ask_all()
            found = await one.until(lambda tier: tier.errors > 0)
            assert "digest" in found.error
            assert not found.hits
            await books_are_right(running)


async def test_kv_of_other_weights_stays_apart(tiny_model: Callable[..., Path]) -> None:
    """Workers of the same model files with other dtypes of the weights share a store."""
    async with store() as (address, _):
        made = ClusterConfig.model_validate(
            {
                "model": {"dtype": "float32"},
                "kv": {"block_size": 16, "memory": "160KiB", "tiers": [stores(address)]},
                "decode": {"chunk_tokens": 32},
            }
        )
        rounded = made.model_copy(
            update={"decode": made.decode.model_copy(update={"weights": "int8"})}
        )
        tokens = tuple(2 + (3 * place + place * place) % 120 for place in range(61))
        answers: dict[int, list[int]] = {}
        for number, (config, cached) in enumerate(
            ((rounded, 0), (made, 0), (rounded, 48), (made, 48))
        ):
            async with workers(tiny_model(), config, "decode-0") as running:
                one = await Client.of(running)
                await opened(one)
                session = await running.session("decode-0")
                params = SamplingParams(temperature=0.0, max_tokens=12, seed=5, ignore_eos=True)
                await session.send(RunLocal(SequenceSpec("r", 0, tokens, len(tokens), params)))
                first = await session.tokens()
                assert first.prefill is not None
                assert first.prefill.cached_tokens == cached
                got = [*first.token_ids, *await session.answer()]
                assert answers.setdefault(number % 2, got) == got
                for other in range(1, 8):
                    more = tuple(2 + (7 * other + token) % 120 for token in tokens)
                    spec = SequenceSpec(f"r{other}", 0, more, len(more), params)
                    await session.send(RunLocal(spec))
                    await session.answer()
                if not cached:
                    await one.until(lambda tier: tier.stored >= 8)
