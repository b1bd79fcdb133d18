"""Every way to drop tokens frees whole blocks, keeps every other token once, and writes no block
that others read.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.token_eviction.compaction import Compaction, compact


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int, int, set[int]]:
    """dropped, num_rows, num_blocks, block_size and fixed of `compact`."""
    size = draw(st.integers(1, 6))
    full = draw(st.integers(1, 12))
    num_rows = full * size + draw(st.integers(0, size - 1))
    num_blocks = -(-num_rows // size) + draw(st.integers(0, 3))
    freed = draw(st.integers(0, full))
    rows = draw(st.permutations(range(full * size)))[: freed * size]
    fixed = draw(st.sets(st.integers(0, num_blocks - 1)))
    return rows, num_rows, num_blocks, size, fixed


def moved(case: tuple[list[int], int, int, int, set[int]], plan: Compaction) -> list[list[int]]:
    """What is in the blocks after the moves, made one by one in any order: row numbers."""
    _dropped, _num_rows, num_blocks, size, fixed = case
    memory = [
        list(range(place * size, (place + 1) * size)) if place < num_blocks else [-1] * size
        for place in range(num_blocks + plan.num_spare)
    ]
    sources = {(row // size, row % size) for row, _, _ in plan.moves}
    targets = {(place, offset) for _, place, offset in plan.moves}
    assert len(targets) == len(plan.moves)
    assert not sources & targets, "the order of the moves does not matter"
    for row, place, offset in plan.moves:
        assert place not in fixed or place >= num_blocks, "others read this block"
        memory[place][offset] = memory[row // size][row % size]
    return [memory[place] for place in plan.places]


@given(cases())
def test_what_is_kept_fills_whole_blocks(case: tuple[list[int], int, int, int, set[int]]) -> None:
    dropped, num_rows, num_blocks, size, fixed = case
    plan = compact(dropped, num_rows, num_blocks, size, fixed)
    assert len(set(plan.places)) == len(plan.places) == num_blocks - len(dropped) // size
    kept = set(range(num_rows)) - set(dropped)
    assert sorted(plan.rows) == sorted(kept)
    in_order = [row for block in moved(case, plan) for row in block]
    assert in_order[: len(kept)] == list(plan.rows)
    tail = range(num_rows // size * size, num_rows)
    assert list(plan.rows)[len(kept) - len(tail) :] == list(tail), "new tokens follow the last"


@given(cases())
def test_few_rows_move(case: tuple[list[int], int, int, int, set[int]]) -> None:
    """No more than those in the emptiest blocks."""
    dropped, num_rows, num_blocks, size, fixed = case
    plan = compact(dropped, num_rows, num_blocks, size, fixed)
    survivors = sorted(
        size - sum(row // size == place for row in dropped) for place in range(num_rows // size)
    )
    if not fixed:
        assert plan.num_spare == 0
        assert len(plan.moves) == sum(survivors[: len(dropped) // size])


@given(cases())
def test_the_order_does_not_depend_on_what_others_read(
    case: tuple[list[int], int, int, int, set[int]],
) -> None:
    """Whether the prefix cache has the same blocks already is a matter of other requests."""
    dropped, num_rows, num_blocks, size, fixed = case
    plan = compact(dropped, num_rows, num_blocks, size, fixed)
    assert plan.rows == compact(dropped, num_rows, num_blocks, size, ()).rows
    assert plan.num_spare <= len(fixed)
