"""Bodies that come at one moment, and how long they keep the event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from router.read_turns import SLICE_S, ReadTurns


class Clock:
    """Each read takes as long as its data is; nothing else takes time."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def reader(clock: Clock, to: list[bytes]) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        clock.time += len(data) * SLICE_S / 4
        to.append(data)

    return read


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8)), max_size=60))
def test_rounds_of_the_loop_are_short_and_each_connections_data_stays_in_order(came: list[tuple[int, int]]) -> None:
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
        for i, (connection, size) in enumerate(came):
            data = bytes([i]) * size
            before = len(found[connection])
            assert turns.read(reader(clock, found[connection]), data) == (len(found[connection]) > before)
        while sum(map(len, found.values())) < len(came):
            await asyncio.sleep(0)
        rounds.append(clock.time)
        for connection in range(6):
            assert [one[0] for one in found[connection]] == [i for i, (c, _) in enumerate(came) if c == connection]
        longest = max((size for _, size in came), default=0) * SLICE_S / 4
        assert all(after - before <= SLICE_S + longest for before, after in itertools.pairwise(rounds))

    asyncio.run(run())


async def test_a_single_body_is_read_at_once() -> None:
    turns, found = ReadTurns(), []
    for _ in range(3):
        assert turns.read(found.append, b"x")
        await asyncio.sleep(0)
    assert found == [b"x"] * 3
