"""Which KV rows move so that dropped tokens leave whole blocks free. Pure: no torch, no memory.

Tokens that a score drops lie scattered over nearly all blocks of a sequence, so dropping them frees
nothing by itself. Attention does not depend on the order of KV rows, since each key holds its
position. So the rows that survive in the emptiest blocks move into the holes of the others, and few
rows move.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True)
class Compaction:
    """The moves of one sequence. A row counts the tokens with KV, from 0; a place counts the blocks
    of the block table.
    """

    # (row, place of the target block, offset in that block). No target is the source of a move.
    # Places from the end of the table on are blocks to allocate.
    moves: tuple[tuple[int, int, int], ...]
    # The places of the blocks after the moves, in the order of the new block table.
    places: tuple[int, ...]
    # The old row of each new row.
    rows: tuple[int, ...]
    # Blocks to allocate.
    num_spare: int


def compact(
    dropped: Collection[int],
    num_rows: int,
    num_blocks: int,
    block_size: int,
    fixed: Collection[int],
) -> Compaction:
    """Plans how the rows that are not dropped fill whole blocks.

    dropped: rows of full blocks, a multiple of block_size in number. The last block, if it is not
    full, and blocks after it stay at the end of the table. fixed: places of blocks that must not be
    written, since others read them too.
    """
    assert len(dropped) % block_size == 0, f"{len(dropped)} tokens are not whole blocks"
    full = num_rows // block_size
    gone = set(dropped)
    assert all(0 <= row < full * block_size for row in gone), "a token of the last block is dropped"
    holes: dict[int, list[int]] = {place: [] for place in range(full)}
    for row in sorted(gone):
        holes[row // block_size].append(row % block_size)
    vacated = _vacated(holes, set(fixed), len(gone) // block_size)
    num_spare = len(vacated) - len(gone) // block_size
    kept = [place for place in range(full) if place not in vacated]
    spare = range(num_blocks, num_blocks + num_spare)
    targets = [(place, offset) for place in kept for offset in holes[place]]
    targets += [(place, offset) for place in spare for offset in range(block_size)]
    moving = [
        row
        for place in sorted(vacated)
        for row in range(place * block_size, (place + 1) * block_size)
        if row not in gone
    ]
    moves = tuple((row, *target) for row, target in zip(moving, targets, strict=True))
    places = (*kept, *spare, *range(full, num_blocks))
    return Compaction(
        moves, places, _rows(moves, places, num_rows - len(gone), block_size), num_spare
    )


def _vacated(holes: dict[int, list[int]], fixed: set[int], count: int) -> set[int]:
    """At least `count` places: fixed ones with holes, and those with the most holes."""
    vacated = {place for place in fixed if holes.get(place)}
    others = sorted(holes.keys() - vacated, key=lambda place: (-len(holes[place]), -place))
    return vacated | set(others[: max(0, count - len(vacated))])


def _rows(
    moves: Sequence[tuple[int, int, int]], places: Sequence[int], count: int, block_size: int
) -> tuple[int, ...]:
    """The old row of each of the `count` new rows."""
    came = {(place, offset): row for row, place, offset in moves}
    found = (
        came.get((place, offset), place * block_size + offset)
        for place in places
        for offset in range(block_size)
    )
    return tuple(islice(found, count))
