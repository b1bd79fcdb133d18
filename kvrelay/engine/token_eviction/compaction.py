"""Which KV rows move so that dropped tokens leave whole blocks free. Pure: no torch, no memory.

Tokens that a score drops lie scattered over nearly all blocks of a sequence, so dropping them frees
nothing by itself. Attention does not depend on the order of KV rows, since each key holds its
position. So the rows that survive in the emptiest blocks move into the holes of the others, and few
rows move.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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
    written, since others read them too. Where rows would move into one, it is copied first.

    The order of the rows does not depend on `fixed`: attention adds in this order, and its rounding
    would choose other tokens at the next eviction.
    """
    assert len(dropped) % block_size == 0, f"{len(dropped)} tokens are not whole blocks"
    full = num_rows // block_size
    gone = set(dropped)
    assert all(0 <= row < full * block_size for row in gone), "a token of the last block is dropped"
    holes: dict[int, list[int]] = {place: [] for place in range(full)}
    for row in sorted(gone):
        holes[row // block_size].append(row % block_size)
    emptiest = sorted(holes, key=lambda place: (-len(holes[place]), -place))
    vacated = set(emptiest[: len(gone) // block_size])
    kept = [place for place in range(full) if place not in vacated]
    copied = [place for place in kept if holes[place] and place in fixed]
    # The place of each block after the moves, by its place before.
    after = {place: place for place in kept} | {
        place: num_blocks + number for number, place in enumerate(copied)
    }

    def survivors(places: Iterable[int]) -> list[int]:
        rows = (place * block_size + offset for place in places for offset in range(block_size))
        return [row for row in rows if row not in gone]

    targets = [(after[place], offset) for place in kept for offset in holes[place]]
    moving = survivors(sorted(vacated))
    copies = [(row, after[row // block_size], row % block_size) for row in survivors(copied)]
    moves = (*copies, *((row, *to) for row, to in zip(moving, targets, strict=True)))
    places = (*(after[place] for place in kept), *range(full, num_blocks))
    rows = _rows(moves, places, num_rows - len(gone), block_size)
    return Compaction(moves, places, rows, len(copied))


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
