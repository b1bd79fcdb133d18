"""What comes at one moment, how long it keeps the event loop, and whose is read first."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from router.api.http.connections.read_turns import SLICE_S, ReadTurns

BYTE_S = 2.0**-12  # about a quarter of a slice; sums are exact


class Clock:
    """Each read takes as long as its data is; nothing else takes time."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def reader(clock: Clock, to: list[bytes], data: bytes) -> Callable[[], None]:
    def read() -> None:
        clock.time += len(data) * BYTE_S
        to.append(data)

    return read


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8)), max_size=60))
def test_rounds_of_the_loop_are_short_and_what_one_sends_stays_in_order(
    came: list[tuple[int, int]],
) -> None:
    async def run() -> None:
        clock, loop = Clock(), asyncio.get_running_loop()
        turns = ReadTurns(clock)
        found: dict[int, list[bytes]] = defaultdict(list)
        rounds = [0.0]

        def tick() -> None:
            rounds.append(clock.time)
            if sum(map(len, found.values())) < len(came):
                loop.call_soon(tick)

        loop.call_soon(tick)
        for i, (tenant, size) in enumerate(came):
            data = bytes([i]) * size
            before = len(found[tenant])
            assert turns.take(tenant, reader(clock, found[tenant], data)) == (
                len(found[tenant]) > before
            )
        while sum(map(len, found.values())) < len(came):
            await asyncio.sleep(0)
        rounds.append(clock.time)
        for tenant in range(6):
            assert [one[0] for one in found[tenant]] == [
                i for i, (t, _) in enumerate(came) if t == tenant
            ]
        longest = max((size for _, size in came), default=0) * BYTE_S
        assert all(
            after - before <= SLICE_S + longest for before, after in itertools.pairwise(rounds)
        )

    asyncio.run(run())


@given(st.integers(1, 200), st.lists(st.integers(0, 3), max_size=8))
def test_nobody_waits_for_more_than_one_read_of_each_other(many: int, others: list[int]) -> None:
    """However much one sends before."""

    async def run() -> list[str]:
        clock, order = Clock(), []

        def read(who: str) -> None:
            clock.time += SLICE_S * 2
            order.append(who)

        turns = ReadTurns(clock)
        for who in ["hostile"] * many + [f"tenant {other}" for other in others] + ["victim"]:
            turns.take(who, partial(read, who))
        while len(order) < many + len(others) + 1:
            await asyncio.sleep(0)
        return order

    before = asyncio.run(run())
    before = before[1 : before.index("victim")]  # the very first did not wait
    assert all(before.count(who) <= 1 for who in before)


async def test_what_comes_alone_is_read_at_once() -> None:
    turns, found = ReadTurns(), []
    for _ in range(3):
        assert turns.take("a", partial(found.append, b"x"))
        await asyncio.sleep(0)
    assert found == [b"x"] * 3
