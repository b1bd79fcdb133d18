"""Tiers whose disk fails: no wrong token, no hang, and the reason is told."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from simulation.toy_engine import answer
from support.stores import BLOCK_BYTES, LAYOUT, contents, key, stored, until
from support.tiers_first import read_always
from support.toy_client import PARAMS, ToyClient, books_are_right, prompt
from support.toy_workers import toy_config, toy_workers

from kvrelay.clock import MonotonicClock
from kvrelay.types.kv_block import BlockKey
from kvrelay.types.requests import SequenceSpec
from kvrelay.worker.tiers import disk_tier, tier_fetcher
from kvrelay.worker.tiers.slot_folder import SlotFolder
from kvrelay.worker.tiers.tier import StoredBlock
from kvrelay.worker_messages import Abort, RunLocal

BLOCKS = 40


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy computes sooner than any file is opened. Pauses are short."""
    read_always(monkeypatch)
    monkeypatch.setattr(tier_fetcher, "_SHORTEST_S", 30.0)
    monkeypatch.setattr(tier_fetcher, "_LONGEST_S", 60.0)
    monkeypatch.setattr(disk_tier, "_PAUSE_S", 0.05)
    monkeypatch.setattr(disk_tier, "_LONGEST_PAUSE_S", 0.1)


def tiers(path: Path, blocks: int = 500) -> list[dict[str, Any]]:
    return [{"kind": "disk", "path": str(path), "size": blocks * 4096}]


class Client(ToyClient):
    async def ask_all(self, count: int = 12) -> int:
        """Tokens of all prompts that came from a tier."""
        return sum([(await self.ask(prompt(number))).fetched_tokens for number in range(count)])


def files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.kv"))


def damage(path: Path, rng: random.Random) -> None:
    """Some files get other bytes, other lengths, other contents, or are removed."""
    found = files(path)
    for file in rng.sample(found, len(found) // 3):
        # The worker may remove files at the same time.
        with contextlib.suppress(FileNotFoundError):
            damage_file(file, rng.choice(found), rng)


def damage_file(file: Path, other: Path, rng: random.Random) -> None:
    # Not empty, though it may have been cut before.
    raw = bytearray(file.read_bytes() + b"\0")
    match rng.randrange(5):
        case 0:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        case 1:
            del raw[rng.randrange(len(raw)) :]
        case 2:
            raw = bytearray(other.read_bytes())
        case 3:
            file.unlink()
            return
        case _:
            raw = bytearray(rng.randbytes(len(raw)))
    file.write_bytes(raw)


@pytest.mark.parametrize("seed", range(3))
async def test_conversations_of_tenants_over_a_disk_that_rots(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "kv"
    async with toy_workers(
        toy_config(tiers(path, rng.choice((20, 60, 500)))), BLOCKS, "decode-0", "decode-1"
    ) as running:
        clients = [await Client.of(running, name) for name in ("decode-0", "decode-1")]
        talks = {
            (tenant, number): prompt(rng.randrange(1000), rng.randrange(5, 30))
            for tenant in ("", "a", "b")
            for number in range(5)
        }

        async def talk(one: Client) -> int:
            fetched = 0
            for _ in range(40):
                tenant, number = rng.choice(list(talks))
                tokens = talks[tenant, number]
                fetched += (await one.ask(tokens, tenant)).fetched_tokens
                more = (*tokens, *answer(tokens, PARAMS), *prompt(rng.randrange(1000), 3))
                if len(more) < 80:
                    talks[tenant, number] = more
                if rng.random() < 0.2:
                    damage(path, rng)
            return fetched

        # A machine that is busy may store nothing in time.
        for _ in range(10):
            if sum(await asyncio.gather(*map(talk, clients))):
                break
        else:
            pytest.fail("nothing came from the tiers")
        await books_are_right(running)
        for one in clients:
            found = await one.tier()
            assert found.used_bytes <= found.size_bytes


async def test_everything_on_the_disk_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    made = toy_config(tiers(path))
    async with toy_workers(made, BLOCKS, "decode-0", drains=True) as running:
        await (await Client.of(running)).ask_all()
    before = files(path)
    assert before
    for file in before:
        raw = bytearray(file.read_bytes())
        # The last byte of the KV itself.
        raw[-1] ^= 1
        file.write_bytes(raw)
    async with toy_workers(made, BLOCKS, "decode-0") as running:
        one = await Client.of(running)
        # Prompts do not wait until a worker has found its files.
        await one.until(lambda tier: tier.blocks > 0)
        assert await one.ask_all() == 0
        found = await one.until(lambda tier: tier.errors > 0)
        assert "digest" in found.error
        assert found.hits == 0
        await books_are_right(running)


@pytest.mark.long
async def test_a_foreign_models_files_are_not_read_and_make_room(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    made = toy_config(tiers(path, 60))
    async with toy_workers(made, BLOCKS, "decode-0", drains=True) as running:
        await (await Client.of(running)).ask_all()
    old = next((path / "worker-0").glob("[0-9a-f]*"))
    renamed = old.with_name("f" * 16)
    old.rename(renamed)
    foreign = files(path)
    assert len(foreign) > 30
    async with toy_workers(made, BLOCKS, "decode-0", drains=True) as running:
        one = await Client.of(running)
        assert await one.ask_all() == 0
        found = await one.until(lambda tier: tier.stored > 30)
        assert found.used_bytes <= 60 * 4096
        await one.ask_all()
    assert len(files(path)) <= 60
    assert len(files(renamed)) < len(foreign)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opened at the end, so that no thread is left behind."""
    event = threading.Event()
    yield event
    event.set()


async def test_a_disk_that_hangs_while_it_is_read(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_fetcher, "_SHORTEST_S", 0.1)
    monkeypatch.setattr(tier_fetcher, "_LONGEST_S", 0.2)
    made = toy_config(tiers(tmp_path / "kv"))
    async with toy_workers(made, BLOCKS, "decode-0") as running:
        one = await Client.of(running)
        await one.ask_all()
        await one.until(lambda tier: tier.stored > 60)
        read = SlotFolder.read
        began = threading.Event()

        def hang(*arguments: Any, **options: Any) -> Any:
            began.set()
            assert gate.wait(60)
            return read(*arguments, **options)

        monkeypatch.setattr(SlotFolder, "read", hang)
        assert await one.ask_all() == 0
        assert began.is_set()
        await books_are_right(running)


async def test_a_disk_that_hangs_while_it_is_written(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()

    def hang(*_: Any) -> None:
        began.set()
        assert gate.wait(60)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(SlotFolder, "write", hang)
    monkeypatch.setattr(disk_tier, "STAGING_BYTES", 10 * 128)
    monkeypatch.setattr(disk_tier, "_CLOSE_S", 0.1)
    async with toy_workers(toy_config(tiers(tmp_path / "kv")), BLOCKS, "decode-0") as running:
        one = await Client.of(running)
        await one.ask_all()
        assert began.is_set()
        # The pool's evictions did not wait for the disk.
        await one.ask_all()
        await books_are_right(running)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
async def test_a_disk_that_cannot_be_written_to_for_a_while(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = True
    writev = os.writev

    def fail(file: int, *arguments: Any) -> int:
        if broken:
            raise OSError(number, os.strerror(number))
        return writev(file, *arguments)

    monkeypatch.setattr(os, "writev", fail)
    async with toy_workers(toy_config(tiers(tmp_path / "kv")), BLOCKS, "decode-0") as running:
        one = await Client.of(running)
        await one.ask_all()
        found = await one.until(lambda tier: tier.errors > 0)
        assert found.error == os.strerror(number)
        assert (found.blocks, found.stored) == (0, 0)
        broken = False
        await one.ask_all()
        await one.until(lambda tier: tier.stored > 30)
        assert await one.ask_all()
        await books_are_right(running)


async def test_a_path_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    made = toy_config(tiers(tmp_path / "file" / "kv"))
    async with toy_workers(made, BLOCKS, "decode-0", drains=True) as running:
        one = await Client.of(running)
        assert await one.ask_all() == 0
        found = await one.until(lambda tier: tier.errors > 0)
        assert found.error == f"{tmp_path / 'file'}: File exists"
        await books_are_right(running)


@pytest.mark.parametrize("what", ["kv", "kv/worker-0"])
async def test_a_worker_whose_folder_was_removed_makes_another(tmp_path: Path, what: str) -> None:
    """As a cleaner of temporary files removes it."""
    path = tmp_path / "kv"
    async with toy_workers(toy_config(tiers(path)), BLOCKS, "decode-0") as running:
        one = await Client.of(running)
        await one.ask_all()
        await one.until(lambda tier: tier.stored > 60)
        (tmp_path / what).rename(tmp_path / "gone")
        async with asyncio.timeout(120):
            while len(files(path)) < 20 or not await one.ask_all():
                await one.ask_all()
        assert await one.until(lambda tier: "removed the folder" in tier.error)
        await books_are_right(running)


async def test_a_folder_that_is_removed_under_the_worker(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    async with toy_workers(toy_config(tiers(path)), BLOCKS, "decode-0") as running:
        one = await Client.of(running)
        await one.ask_all()
        await one.until(lambda tier: tier.stored > 60)
        (folder,) = (path / "worker-0").glob("[0-9a-f]*")
        folder.rename(tmp_path / "elsewhere")
        await one.ask_all()
        await one.ask_all()
        await books_are_right(running)


async def test_a_request_that_is_cancelled_while_it_reads(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with toy_workers(toy_config(tiers(tmp_path / "kv")), BLOCKS, "decode-0") as running:
        session = await running.session("decode-0")
        one = Client(session)
        await one.ask_all()
        await one.until(lambda tier: tier.stored > 60)
        read, began = SlotFolder.read, threading.Event()

        def hang(*arguments: Any, **options: Any) -> Any:
            began.set()
            assert gate.wait(60)
            return read(*arguments, **options)

        monkeypatch.setattr(SlotFolder, "read", hang)
        spec = SequenceSpec("gone", 0, prompt(0), len(prompt(0)), PARAMS)
        await session.send(RunLocal(spec))
        assert await asyncio.to_thread(began.wait, 30)
        await session.send(Abort("gone", 0))
        await books_are_right(running)
        gate.set()
        await one.ask_all()
        await books_are_right(running)


async def test_one_tenant_cannot_flush_anothers_files(tmp_path: Path) -> None:
    async with toy_workers(toy_config(tiers(tmp_path / "kv", 80)), BLOCKS, "decode-0") as running:
        one = await Client.of(running)
        for number in range(3):
            await one.ask(prompt(number), "small")
        for number in range(30):
            await one.ask(prompt(100 + number), "large")
            await one.until(lambda tier: True)
        fetched = [(await one.ask(prompt(number), "small")).cached_tokens for number in range(3)]
        assert all(fetched), fetched


async def test_damaged_files_of_a_worker_that_is_gone_are_stored_anew(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    made = toy_config(tiers(path))
    async with toy_workers(made, BLOCKS, "decode-0", drains=True) as running:
        await (await Client.of(running)).ask_all()
    for file in files(path):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    (layout,) = (path / "worker-0").glob("[0-9a-f]*")
    # No worker cleans the folder up.
    owner = SlotFolder(path, layout.name, 128)
    owner.claim()
    async with toy_workers(made, BLOCKS, "decode-0") as running:
        one = await Client.of(running)
        # At least once for each damaged block of a prompt.
        for _ in range(30):
            if await one.ask_all():
                break
        else:
            pytest.fail("nothing comes from the tier")
        await books_are_right(running)
    owner.release()


async def test_a_file_that_cannot_be_read_is_stored_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: set[bytes] = set()
    healed: set[bytes] = set()
    read, write = SlotFolder.read, SlotFolder.write

    def fail(folder: SlotFolder, key: BlockKey, *, own: bool) -> Any:
        if not healed and not broken:
            broken.add(key.identity)
        if key.identity in broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(folder, key, own=own)

    def heal(folder: SlotFolder, key: BlockKey, *arguments: Any) -> None:
        if key.identity in broken:
            healed.add(key.identity)
            broken.clear()
        write(folder, key, *arguments)

    monkeypatch.setattr(SlotFolder, "read", fail)
    monkeypatch.setattr(SlotFolder, "write", heal)
    async with toy_workers(toy_config(tiers(tmp_path / "kv")), BLOCKS, "decode-0") as running:
        one = await Client.of(running)
        for _ in range(30):
            await one.ask_all()
            if healed:
                break
        else:
            pytest.fail("the block is not stored again")
        assert (await one.tier()).error == os.strerror(errno.EIO)
        await books_are_right(running)


async def test_a_block_that_comes_into_doubt_while_it_is_written_is_written_again(
    tmp_path: Path, gate: threading.Event
) -> None:
    began = threading.Event()

    class Slow(SlotFolder):
        def write(self, *arguments: Any) -> Any:
            began.set()
            assert gate.wait(60)
            return super().write(*arguments)

    folder = Slow(tmp_path / "kv", LAYOUT, BLOCK_BYTES)
    tier = disk_tier.DiskTier(folder, 2**20, BLOCK_BYTES, MonotonicClock())
    running = asyncio.create_task(tier.run())
    try:
        await until(lambda: tier.works)
        tier.offer(StoredBlock(key(1), stored(2).copy))
        await asyncio.to_thread(began.wait, 60)
        tier.forget(key(1))
        tier.offer(stored(1))
        gate.set()
        await until(lambda: not tier._waiting and not tier._doomed)
        (found,) = await tier.read([key(1)])
        assert found.copy.data.tobytes() == contents(1)
    finally:
        running.cancel()
        await asyncio.wait([running])
        await tier.close()


@contextlib.asynccontextmanager
async def disk(path: Path) -> AsyncIterator[disk_tier.DiskTier]:
    """The tier of a worker, running."""
    folder = SlotFolder(path, LAYOUT, BLOCK_BYTES)
    tier = disk_tier.DiskTier(folder, 2**20, BLOCK_BYTES, MonotonicClock())
    running = asyncio.create_task(tier.run())
    try:
        await until(lambda: tier.works)
        yield tier
    finally:
        running.cancel()
        await asyncio.wait([running])
        await tier.close()


def named(number: int) -> StoredBlock:
    """A block that a restarted worker finds."""
    block = stored(number)
    return StoredBlock(BlockKey(b"hash", block.key.identity, "t"), block.copy)


def failing(real: Callable[..., None], times: int) -> Callable[..., None]:
    """The function, which fails some times first."""
    left = times

    def call(*arguments: Any) -> None:
        nonlocal left
        if left:
            left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(*arguments)

    return call


@pytest.mark.parametrize("method", ["check_claim", "remove_file"])
async def test_a_file_in_doubt_is_removed_when_the_disk_works_again(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    async with disk(path) as tier, disk(path) as other:
        for number in (1, 2):
            tier.offer(named(number))
        await until(lambda: tier.num_blocks == 2)
        monkeypatch.setattr(SlotFolder, method, failing(getattr(SlotFolder, method), 3))
        tier.forget(named(1).key)
        # Nobody offers a block.
        await until(lambda: len(files(path)) == 1, 20)
        assert await other.probe([named(1).key]) == 0
        assert await other.probe([named(2).key]) == 1
    async with disk(path) as tier:
        assert [tier.touch(named(number).key) for number in (1, 2)] == [False, True]


async def test_a_worker_that_ends_in_order_removes_files_in_doubt_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, remove = tmp_path / "kv", SlotFolder.remove
    gates = [threading.Event(), threading.Event()]
    waiting = iter(gates)

    def slow(*arguments: Any) -> None:
        assert next(waiting).wait(60)
        remove(*arguments)

    async with disk(path) as tier:
        for number in range(3):
            tier.offer(named(number))
        await until(lambda: tier.num_blocks == 3)
        monkeypatch.setattr(SlotFolder, "remove", slow)
        tier.forget(named(0).key)
        await until(lambda: tier._writes.pending)
        # While the first file is removed.
        tier.forget(named(1).key)
        gates[0].set()
        await until(lambda: not tier._doomed)
        # While the second is.
        assert not tier.is_drained
        gates[1].set()
        # What `TierStore.flush` waits for.
        while not tier.is_drained:
            await asyncio.sleep(0)
    async with disk(path) as tier:
        assert [tier.touch(named(number).key) for number in range(3)] == [False, False, True]


async def test_a_file_in_doubt_is_not_read_if_its_disk_comes_back_during_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, older, block, write = tmp_path / "kv", tmp_path / "older", named(1), SlotFolder.write
    entered, gate = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        write(*arguments)
        entered.set()
        assert gate.wait(60)

    async with disk(path) as tier:
        tier.offer(StoredBlock(block.key, stored(2).copy))
        tier.offer(named(3))
        await until(lambda: tier.num_blocks == 2)
        shutil.copytree(path, older)
        tier.forget(block.key)
        await until(lambda: tier.is_drained)
        monkeypatch.setattr(SlotFolder, "write", slow)
        tier.offer(block)
        await until(entered.is_set)
        path.rename(tmp_path / "away")
        older.rename(path)
        assert await tier.read([named(3).key]) == []
        gate.set()
        await until(lambda: tier.works and tier.touch(named(3).key))
        assert await tier.read([block.key]) == []


async def test_an_error_that_is_about_no_block_gives_none_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with disk(tmp_path / "kv") as tier:
        tier.offer(named(1))
        await until(lambda: tier.num_blocks == 1)
        with monkeypatch.context() as patch:
            patch.setattr(SlotFolder, "check_claim", broken)
            assert await tier.read([named(1).key]) == []
        assert tier.counts.errors
        (found,) = await tier.read([named(1).key])
        assert found.copy.data.tobytes() == contents(1)


async def test_a_file_that_cannot_be_removed_is_given_up_after_some_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_MOST_TRIES", 3)
    path, remove, tried = tmp_path / "kv", SlotFolder.remove, [0.0]

    def fail(folder: SlotFolder, one: BlockKey) -> None:
        if one.identity == key(1).identity:
            tried.append(MonotonicClock().now())
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        remove(folder, one)

    monkeypatch.setattr(SlotFolder, "remove", fail)
    async with disk(path) as tier:
        for number in range(1, 4):
            tier.offer(named(number))
        await until(lambda: tier.num_blocks == 3)
        for number in (1, 2):
            tier.forget(named(number).key)
        # It holds up no other file.
        await until(lambda: len(files(path)) == 2)
        await until(lambda: "cannot be removed" in tier.counts.error)
        await asyncio.sleep(10 * disk_tier._PAUSE_S)
        _, first, second, third = tried
        assert second - first >= disk_tier._PAUSE_S
        assert third - second >= 2 * disk_tier._PAUSE_S
        assert tier.works
        tier.offer(named(4))
        await until(lambda: tier.num_blocks == 2)


async def test_a_block_that_is_stored_over_a_file_that_could_not_be_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    monkeypatch.setattr(SlotFolder, "remove", failing(SlotFolder.remove, 1))
    async with disk(path) as tier:
        block = named(1)
        tier.offer(StoredBlock(block.key, stored(2).copy))
        await until(lambda: tier.num_blocks == 1)
        # The tier takes blocks again before the file is tried again.
        monkeypatch.setattr(disk_tier, "_PAUSE_S", 1.0)
        tier.forget(block.key)
        await until(lambda: tier.counts.errors)
        await tier.wait_for_room()
        tier.offer(block)
        await until(lambda: tier.num_blocks == 1)
        await asyncio.sleep(1.2)
        (found,) = await tier.read([block.key])
        assert found.copy.data.tobytes() == contents(1)


@pytest.mark.parametrize("when", ["before the loss", "after the loss", "and is stored again"])
async def test_a_file_that_comes_into_doubt_while_its_disk_is_away_is_removed_afterwards(
    tmp_path: Path, when: str
) -> None:
    path, away = tmp_path / "kv", tmp_path / "away"
    async with disk(path) as tier:
        for number in (1, 2):
            tier.offer(named(number))
        await until(lambda: tier.num_blocks == 2)
        path.rename(away)
        if when == "after the loss":
            tier.offer(named(3))
            await until(lambda: tier.counts.errors)
        tier.forget(named(1).key)
        # The tier goes on in a new folder.
        await until(lambda: tier.counts.errors and tier.works)
        if when == "and is stored again":
            tier.offer(named(1))
            await until(lambda: tier.num_blocks == 1)
        path.rename(tmp_path / "meanwhile")
        away.rename(path)
        tier.offer(named(4))
        await until(lambda: tier.touch(named(2).key))
        await until(lambda: len(files(path)) == 1)
        assert not tier.holds(named(1).key)
        assert await tier.read([named(1).key]) == []
        assert await tier.probe([named(2).key]) == 1


async def test_a_file_in_doubt_is_not_read_before_the_tier_knows_that_its_disk_is_back(
    tmp_path: Path,
) -> None:
    path, away, block = tmp_path / "kv", tmp_path / "away", named(1)
    async with disk(path) as tier:
        tier.offer(StoredBlock(block.key, stored(2).copy))
        tier.offer(named(3))
        await until(lambda: tier.num_blocks == 2)
        path.rename(away)
        tier.forget(block.key)
        await until(lambda: tier.counts.errors and tier.works)
        tier.offer(block)
        await until(lambda: tier.num_blocks == 1)
        path.rename(tmp_path / "meanwhile")
        away.rename(path)
        # Nothing is written meanwhile.
        assert await tier.read([block.key]) == []
        await until(lambda: tier.touch(named(3).key))
        await until(lambda: len(files(path)) == 1)
        assert await tier.read([block.key]) == []
        (found,) = await tier.read([named(3).key])
        assert found.copy.data.tobytes() == contents(3)


async def test_another_workers_file_in_doubt_is_not_read_after_an_eviction(tmp_path: Path) -> None:
    path, block = tmp_path / "kv", named(1)
    async with disk(path) as other, disk(path) as tier:
        other.offer(StoredBlock(block.key, stored(2).copy))
        await until(lambda: other.num_blocks == 1)
        assert await tier.probe([block.key]) == 1
        tier.forget(block.key)
        tier.offer(block)
        await until(lambda: tier.num_blocks == 1)
        tier._index.make_room(tier._index.capacity)
        assert await tier.probe([block.key]) == 0


async def test_a_block_that_comes_into_doubt_while_it_is_read_is_not_used(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, began = SlotFolder.read, threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        found = read(*arguments, **options)
        began.set()
        assert gate.wait(60)
        return found

    async with disk(tmp_path / "kv") as tier:
        before, block = named(0), named(1)
        tier.offer(before)
        tier.offer(StoredBlock(block.key, stored(2).copy))
        await until(lambda: tier.num_blocks == 2)
        monkeypatch.setattr(SlotFolder, "read", slow)
        reading = asyncio.create_task(tier.read([before.key, block.key]))
        assert await asyncio.to_thread(began.wait, 60)
        tier.forget(named(7).key)
        tier.forget(block.key)
        tier.offer(block)
        await until(lambda: tier.num_blocks == 2)
        gate.set()
        assert [one.key.identity for one in await reading] == [before.key.identity]
        (found,) = await tier.read([block.key])
        assert found.copy.data.tobytes() == contents(1)


async def test_another_workers_file_in_doubt_is_not_read_without_a_search(tmp_path: Path) -> None:
    path, first, second = tmp_path / "kv", named(1), named(2)
    async with disk(path) as other, disk(path) as tier:
        for block in (first, second):
            other.offer(block)
        await until(lambda: other.num_blocks == 2)
        keys = [first.key, second.key]
        assert await tier.probe(keys) == 2
        # After the search, and before the read.
        tier.forget(second.key)
        assert [block.key.identity for block in await tier.read(keys)] == [first.key.identity]
        assert await tier.read([second.key]) == []
