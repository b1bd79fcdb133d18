from __future__ import annotations

from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.types.block_keys import block_key, pack_keys
from kvrelay.worker_messages import CacheUpdate
from router.core.prefixes.prefix_index import PrefixIndex
from router.core.prefixes.prompt_blocks import PromptBlocks

TOKENS = list(range(8))


def blocks_of(tokens: list[int]) -> PromptBlocks:
    made = PromptBlocks(BlockHasher(2, "salt"))
    made.extend(tokens)
    return made


def holding(blocks: PromptBlocks, count: int) -> CacheUpdate:
    hashes = list(blocks.hashes[:count])
    checksum = 0
    for one in hashes:
        checksum ^= block_key(one)
    return CacheUpdate(1, begins=True, stored=pack_keys(hashes), blocks=count, checksum=checksum)


def test_a_worker_that_tells_is_believed_and_not_guessed() -> None:
    index, prompt = PrefixIndex(), blocks_of(TOKENS)
    index.open("new", exact=True)
    index.open("old", exact=False)
    for worker_id in ("new", "old"):
        index.expect(worker_id, prompt, 100)
    assert [index.match(one, prompt) for one in ("new", "old", "never seen")] == [0, 4, 0]
    assert not index.apply("new", holding(prompt, 3), 0.0)
    assert not index.apply("old", holding(prompt, 3), 0.0)
    assert [index.match(one, prompt) for one in ("new", "old")] == [3, 4]
    assert [index.is_exact(one) for one in ("new", "old")] == [True, False]
    assert list(index.sizes()) == [("new", 3)]


def test_the_last_token_is_always_computed() -> None:
    index, prompt = PrefixIndex(), blocks_of(TOKENS)
    index.open("w", exact=True)
    index.apply("w", holding(prompt, 4), 0.0)
    assert index.predict("w", prompt, 8, []) == (6, 0)
    assert index.predict("w", prompt, 9, []) == (8, 0)


def test_what_the_worker_computes_comes_besides() -> None:
    index, prompt = PrefixIndex(), blocks_of(TOKENS)
    index.open("w", exact=True)
    index.open("old", exact=False)
    index.apply("w", holding(prompt, 1), 0.0)
    running = [blocks_of([*TOKENS[:6], 99, 99]), blocks_of([50, 51])]
    assert index.predict("w", prompt, 9, running) == (2, 4)
    assert index.predict("old", prompt, 9, running) == (0, 0)


def test_a_new_incarnation_holds_nothing_and_the_counts_go_on() -> None:
    index, prompt = PrefixIndex(), blocks_of(TOKENS)
    index.open("w", exact=True)
    index.apply("w", holding(prompt, 4), 0.0)
    index.open("w", exact=True)
    assert index.match("w", prompt) == 0
    index.apply("w", holding(prompt, 4), 1.0)
    assert index.match("w", prompt) == 4
    index.drop("w")
    assert index.match("w", prompt) == 0
    assert (index.snapshots, index.gaps) == (2, 0)
