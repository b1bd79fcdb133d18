from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.types.block_keys import block_key, unpack_keys
from router.core.prefixes.prompt_blocks import PromptBlocks

TOKENS = st.lists(st.integers(0, 1), max_size=12)


def blocks_of(tokens: list[int], salt: str = "") -> PromptBlocks:
    made = PromptBlocks(BlockHasher(2, salt, model="layout"))
    made.extend(tokens)
    return made


@given(TOKENS, TOKENS)
def test_keys_follow_the_growing_sequence(first: list[int], more: list[int]) -> None:
    growing, whole = blocks_of(first), blocks_of(first + more)
    before = growing.keys
    copy = before.tolist()
    assert growing.covers(len(first))
    assert growing.covers(len(first + more)) == (len(whole.hashes) == len(growing.hashes))
    growing.extend(first + more)
    assert growing.keys.tolist() == whole.keys.tolist() == list(map(block_key, whole.hashes))
    assert before.tolist() == copy, "what was given out does not change"
    assert unpack_keys(whole.keys.tobytes()) == tuple(whole.keys.tolist())


@given(TOKENS, TOKENS)
def test_common_blocks_are_those_of_the_common_beginning(one: list[int], other: list[int]) -> None:
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    assert blocks_of(one).common(blocks_of(other)) == same // 2


@given(TOKENS)
def test_another_salt_has_nothing_in_common(tokens: list[int]) -> None:
    mine, theirs = blocks_of(tokens, "mine"), blocks_of(tokens, "theirs")
    assert mine.common(theirs) == 0
    assert not set(mine.keys.tolist()) & set(theirs.keys.tolist())
