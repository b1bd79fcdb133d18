from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.blocks.plan import Layers, Places, byte_copies, byte_ranges
from kvrelay.types.kv_layout import KvLayout, LayerKv

LAYOUTS = st.builds(
    KvLayout,
    layers=st.lists(
        st.builds(LayerKv, st.integers(1, 3), st.integers(5, 9), st.integers(1, 5), st.booleans()),
        min_size=1,
        max_size=4,
    ).map(tuple),
    block_size=st.integers(1, 4),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
)


class Case(NamedTuple):
    layout: KvLayout
    source_num_blocks: int
    sources: list[int]
    target_num_blocks: int
    targets: list[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    numbers = [draw(st.integers(1, 12)), draw(st.integers(1, 12))]
    count = draw(st.integers(0, min(numbers)))
    sources, targets = (
        draw(
            st.one_of(
                st.permutations(range(n)).map(lambda p: list(p[:count])),
                st.just(list(range(n - count, n))),
            )
        )
        for n in numbers
    )
    return Case(draw(LAYOUTS), numbers[0], sources, numbers[1], targets)


def arena(layout: KvLayout, num_blocks: int, first: int) -> list[int]:
    """Bytes, each with a value of its own."""
    return list(range(first, first + layout.arena_bytes(num_blocks)))


def naive_blocks(
    layout: KvLayout, data: list[int], num_blocks: int, blocks: list[int]
) -> list[int]:
    taken, start = [], 0
    for size in layout.region_block_bytes:
        for block in blocks:
            taken += data[start + block * size : start + (block + 1) * size]
        start += num_blocks * size
    return taken


@given(cases())
def test_ranges_are_the_blocks_bytes_in_plan_order(case: Case) -> None:
    data = arena(case.layout, case.source_num_blocks, 0)
    ranges = byte_ranges(Places.of_arena(case.layout, case.source_num_blocks), case.sources)
    taken = [byte for offset, length in ranges for byte in data[offset : offset + length]]
    assert taken == naive_blocks(case.layout, data, case.source_num_blocks, case.sources)


@given(cases())
def test_copies_move_the_blocks_and_nothing_else(case: Case) -> None:
    layout = case.layout
    source = arena(layout, case.source_num_blocks, 0)
    before = arena(layout, case.target_num_blocks, len(source))
    target = list(before)
    places = (
        Places.of_arena(layout, case.source_num_blocks),
        Places.of_arena(layout, case.target_num_blocks),
    )
    for origin, offset, length in byte_copies(places[0], case.sources, places[1], case.targets):
        target[offset : offset + length] = source[origin : origin + length]

    def taken(data: list[int]) -> list[int]:
        return naive_blocks(layout, data, case.target_num_blocks, case.targets)

    assert taken(target) == naive_blocks(layout, source, case.source_num_blocks, case.sources)
    touched = set(taken(before))
    assert [byte for byte in before if byte not in touched] == [
        byte for byte, old in zip(target, before, strict=True) if old not in touched
    ]


@given(LAYOUTS, st.integers(1, 9), st.integers(0, 3))
def test_adjacent_blocks_are_one_range_per_region(layout: KvLayout, count: int, first: int) -> None:
    ranges = byte_ranges(Places.of_arena(layout, first + count), list(range(first, first + count)))
    assert [length for _, length in ranges] == [count * size for size in layout.region_block_bytes]


def test_a_copy_ends_where_either_side_is_not_adjacent() -> None:
    layout = KvLayout((LayerKv(1, 1, 1),), block_size=1, dtype="float16")
    places = Places.of_arena(layout, 10)
    copies = byte_copies(places, [0, 1, 2, 3, 5], places, [4, 5, 8, 9, 0])
    assert [length for _, _, length in copies] == [4, 4, 2] * 2


@given(cases(), st.data())
def test_a_push_by_groups_of_layers_is_the_whole_push(case: Case, data: st.DataObject) -> None:
    """Through payloads, as a network transport sends them."""
    layout, num_layers = case.layout, len(case.layout.layers)
    cuts = sorted({0, num_layers, *data.draw(st.lists(st.integers(0, num_layers), max_size=2))})
    source = arena(layout, case.source_num_blocks, 0)
    target = [-1] * layout.arena_bytes(case.target_num_blocks)
    numbers = range(len(case.sources))
    total = 0
    for first, end in pairwise(cuts):
        layers = Layers(first, end - first)
        origin = Places.of_arena(layout, case.source_num_blocks, layers)
        payload = Places.of_payload(layout, len(numbers), layers)
        goal = Places.of_arena(layout, case.target_num_blocks, layers)
        packed = [
            source[r.offset + i] for r in byte_ranges(origin, case.sources) for i in range(r.length)
        ]
        assert len(packed) == len(numbers) * payload.block_bytes
        total += payload.block_bytes
        for copy in byte_copies(payload, numbers, goal, case.targets):
            target[copy.target : copy.target + copy.length] = packed[
                copy.source : copy.source + copy.length
            ]
    assert total == layout.block_bytes
    arrived = naive_blocks(layout, target, case.target_num_blocks, case.targets)
    assert arrived == naive_blocks(layout, source, case.source_num_blocks, case.sources)
    assert sum(byte >= 0 for byte in target) == len(arrived)
