"""What a step is made into before it runs on a GPU."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.base.step_input import Part, Step


def step_of(lengths: list[int], rows: list[int]) -> Step:
    """Token ids count up; each part has its length as its past."""
    parts, row = [], 0
    for new in lengths:
        parts.append(Part(row, new, new, range(100)))
        row += new
    return Step(list(range(row)), parts, rows)


@given(st.data(), st.lists(st.sampled_from([1, 1, 2, 5]), min_size=1, max_size=6))
def test_decoding_first_changes_the_order_and_nothing_else(
    data: st.DataObject, lengths: list[int]
) -> None:
    rows = data.draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=4))
    step = step_of(lengths, rows)
    ordered = step.decoding_first()
    assert [part.new > 1 for part in ordered.parts] == sorted(part.new > 1 for part in step.parts)
    assert [ordered.token_ids[row] for row in ordered.rows] == [
        step.token_ids[row] for row in step.rows
    ]
    tokens = {
        tuple(one.token_ids[p.row : p.row + p.new]) for one in (step, ordered) for p in one.parts
    }
    assert len(tokens) == len(lengths)
    at = 0
    for part in ordered.parts:
        assert part.row == at
        at += part.new


def test_padded_with_sequences_in_a_block_that_is_nobodys() -> None:
    step = Step([7, 8, 9], [Part(i, 1, 10 + i, range(i, 9)) for i in range(3)], [2, 0])
    padded = step.padded(5, block=42)
    assert padded.token_ids == [7, 8, 9, 0, 0]
    assert padded.parts[:3] == step.parts
    assert padded.parts[3:] == [Part(3, 1, 0, (42,)), Part(4, 1, 0, (42,))]
    assert padded.rows == [2, 0, 0, 0, 0]
    assert padded.decodes
    assert padded.slots(4)[3:] == [42 * 4, 42 * 4]
    assert not step_of([1, 2], []).decodes


def test_slots_are_where_the_block_table_says() -> None:
    step = Step([1, 2, 3, 4], [Part(0, 3, 6, [5, 9, 2]), Part(3, 1, 0, [1])], [])
    assert step.positions == [6, 7, 8, 0]
    assert step.slots(4) == [9 * 4 + 2, 9 * 4 + 3, 2 * 4, 1 * 4]
