"""What a step is made into before it runs on a GPU."""

from __future__ import annotations

from kvrelay.engine.base.step_input import Part, Step


def test_padded_with_sequences_in_a_block_that_is_nobodys() -> None:
    step = Step([7, 8, 9], [Part(i, 1, 10 + i, range(i, 9)) for i in range(3)], [2, 0])
    padded = step.padded(5, block=42)
    assert padded.token_ids == [7, 8, 9, 0, 0]
    assert padded.parts[:3] == step.parts
    assert padded.parts[3:] == [Part(3, 1, 0, (42,)), Part(4, 1, 0, (42,))]
    assert padded.rows == [2, 0, 0, 0, 0]
    assert padded.decodes
    assert padded.slots(4)[3:] == [42 * 4, 42 * 4]
    assert not Step([0, 1, 2], [Part(0, 1, 1, range(9)), Part(1, 2, 2, range(9))], []).decodes


def test_slots_are_where_the_block_table_says() -> None:
    step = Step([1, 2, 3, 4], [Part(0, 3, 6, [5, 9, 2]), Part(3, 1, 0, [1])], [])
    assert step.positions == [6, 7, 8, 0]
    assert step.slots(4) == [9 * 4 + 2, 9 * 4 + 3, 2 * 4, 1 * 4]
