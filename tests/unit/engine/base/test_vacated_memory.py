"""Memory of blocks that is given back by a thread while blocks are taken again."""

from __future__ import annotations

import mmap
import os
import random
import threading

import pytest
import torch

from kvrelay.engine.base import vacated_memory
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.vacated_memory import VacatedMemory
from kvrelay.types.kv_layout import KvLayout, LayerKv

# Two layers of one page a block each, for K and for V; the second has a window.
DIM = mmap.PAGESIZE // 16 // 4
LAYOUT = KvLayout((LayerKv(1, DIM, DIM),) * 2, 16, "float32", windows=(0, 32))
BLOCKS = 256
PARTS = (False, True)


def write(pool: KvPool, block: int, windowed: bool, value: float) -> None:
    layer = pool.layers[windowed]
    layer.k[block], layer.v[block] = value, value


def read(pool: KvPool, block: int, windowed: bool) -> set[float]:
    layer = pool.layers[windowed]
    return set(torch.cat([layer.k[block].flatten(), layer.v[block].flatten()]).tolist())


def test_what_is_taken_again_keeps_its_content() -> None:
    """Parts are given up and taken again in any order, many times; what is in use is never lost."""
    draw = random.Random(0)
    pool = KvPool(LAYOUT, BLOCKS)
    held: dict[tuple[int, bool], float] = {}
    for number in range(1, 3000):
        block, windowed = draw.randrange(BLOCKS), draw.choice(PARTS)
        if (block, windowed) not in held:
            pool.vacated.take([block], windowed=windowed)
            write(pool, block, windowed, number)
            held[block, windowed] = number
        if draw.random() < 0.3:
            some = [draw.randrange(BLOCKS) for _ in range(draw.randint(1, 60))]
            only_windowed = draw.random() < 0.5
            for one in some:
                held.pop((one, True), None)
                if not only_windowed:
                    held.pop((one, False), None)
            pool.vacated.give_up(some, only_windowed=only_windowed)
        some_held = draw.choice([*held]) if held else None
        if some_held is not None:
            assert read(pool, *some_held) == {held[some_held]}
    pool.vacated.settle()
    assert all(read(pool, *part) == {value} for part, value in held.items())
    # Each part of a block is two pages.
    assert pool.stored_bytes == len(held) * 2 * mmap.PAGESIZE
    pool.close()


def test_what_is_being_given_back_is_taken_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KvPool(LAYOUT, BLOCKS)
    events: list[str] = []

    def take() -> None:
        pool.vacated.take([1], windowed=False)
        events.append("taken")

    taker = threading.Thread(target=take)

    def give_back(_fd: int, _offset: int, _length: int) -> int:
        if not events:
            taker.start()
            # Long enough for a take that does not wait.
            taker.join(timeout=0.5)
            events.append("given back")
        return 0

    monkeypatch.setattr(vacated_memory, "_punch", give_back)
    pool.vacated.give_up([1])
    pool.vacated.settle()
    taker.join()
    assert events == ["given back", "taken"]
    pool.close()


def test_the_windowed_part_goes_alone() -> None:
    pool = KvPool(LAYOUT, 4)
    for windowed in PARTS:
        write(pool, 1, windowed, 5.0)
    pool.vacated.give_up([1], only_windowed=True)
    pool.vacated.settle()
    assert (read(pool, 1, False), read(pool, 1, True)) == ({5.0}, {0.0})
    pool.close()


def test_a_pool_that_is_closed_gives_nothing_back() -> None:
    pool = KvPool(LAYOUT, BLOCKS)
    vacated = pool.vacated
    vacated.give_up(range(BLOCKS))
    pool.close()
    vacated.settle()
    pool.close()


def test_a_refusal_of_the_system_is_told_once_and_loses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = KvPool(LAYOUT, 4)
    write(pool, 0, windowed=True, value=1.0)
    file = os.open(f"/proc/self/fd/{pool.fd}", os.O_RDONLY)
    vacated = VacatedMemory(LAYOUT, 4, file)
    for _ in range(3):
        vacated.give_up([0, 1])
        vacated.settle()
    vacated.take([0], windowed=True)
    vacated.close()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "kv_memory_not_given_back"
    ]
    assert read(pool, 0, windowed=True) == {1.0}
    os.close(file)
    pool.close()
