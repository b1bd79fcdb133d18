"""Safeguards of blocks without the KV of sliding windows that nothing needs any more."""

from __future__ import annotations

from mutants.mutant import Mutant

POOL = "kvrelay/engine/kvcache/block_pool.py"
CACHE = "kvrelay/engine/kvcache/kv_cache.py"
UNIT = "unit/engine/kvcache/test_windows.py::"
VACATED = "kvrelay/engine/base/vacated_memory.py"
READ = UNIT + "test_what_is_read_is_there"
WORKERS = "unit/worker/test_windows.py::"

MUTANTS = (
    Mutant(
        "a prefix ends with blocks that have their windowed parts",
        CACHE,
        "if not self.pool.has_window(block):",
        "if False:",
        (READ,),
    ),
    Mutant(
        "a part that is held makes room for no other",
        POOL,
        "for block in sorted(blocks, key=self._windows.is_present, reverse=True):",
        "for block in blocks:",
        (UNIT + "test_present_parts_are_held_before_others_take_memory",),
    ),
    Mutant(
        "a block with its windowed part takes over the name of one without",
        POOL,
        "if self.has_window(other) or not self.has_window(block):",
        "if True:",
        (UNIT + "test_a_block_that_is_computed_again_takes_the_name_of_one_without_its_window",),
    ),
    Mutant(
        "the content of a name that is taken over stays the same",
        POOL,
        "self._serials[block] = serial or self.num_contents",
        "self._serials[block] = self.num_contents",
        (UNIT + "test_a_block_that_is_computed_again_takes_the_name_of_one_without_its_window",),
    ),
    Mutant(
        "every hold of a windowed part counts",
        POOL,
        "return 0 if self._windows is None else self._windows.num_holds\n",
        "return 0 if self._windows is None else self._windows.num_present\n",
        (READ,),
    ),
    Mutant(
        "a prompt takes the windowed parts of its later chunks at its start",
        CACHE,
        "return range(first, max(first, min(num_blocks, first + self.most_blocks)))",
        "return range(first, max(first, min(num_blocks, first + 2)))",
        (READ,),
    ),
    Mutant(
        "memory behind the windows is given back",
        VACATED,
        "done = _LIBC.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length)",
        "done = 0",
        (WORKERS + "test_the_memory_behind_the_windows_comes_back",),
    ),
    Mutant(
        "memory that never comes back counts for all blocks",
        "kvrelay/types/kv_layout.py",
        "return max(0, num_bytes - lasting)",
        "return num_bytes",
        (
            "unit/engine/kvcache/test_memory_of_windows.py::"
            "test_blocks_take_no_more_pages_than_the_memory_has",
        ),
    ),
    Mutant(
        "trial steps leave no memory in free blocks",
        "kvrelay/worker/runtime/model_loading.py",
        "runner.kv.vacated.give_up(range(runner.num_blocks))",
        "pass",
        (WORKERS + "test_free_blocks_of_a_loaded_worker_take_no_memory",),
    ),
    Mutant(
        "prompts that are handed over share prefixes without windowed parts",
        CACHE,
        "blocks = blocks[: self._usable(blocks, received)]",
        "blocks = blocks[: self._usable(blocks, 0)]",
        (UNIT + "test_prompts_that_are_handed_over_share_a_prefix_without_its_window",),
    ),
    Mutant(
        "the decode worker takes no windowed layers behind the window",
        "kv_transfer/frame_validator.py",
        "if frame.first < self._windows_from and any(self._theirs.windows[first:end]):",
        "if False:",
        ("unit/kv_transfer/test_windows.py::test_layers_behind_the_window_are_refused",),
    ),
    Mutant(
        "the windowed layers of the last blocks are not missing",
        "kv_transfer/frame_validator.py",
        "return layer if block >= self._windows_from else self._theirs.kept_from(layer)",
        "return self._theirs.kept_from(layer)",
        ("unit/kv_transfer/test_windows.py::test_layers_in_the_window_must_come",),
    ),
    Mutant(
        "a part that is taken again keeps its pages",
        VACATED,
        "waiting.pop(block, None)",
        "pass",
        ("unit/engine/base/test_vacated_memory.py::test_what_is_taken_again_keeps_its_content",),
    ),
    Mutant(
        "a part that is being given back is waited for",
        VACATED,
        "while not self._going[windowed].isdisjoint(blocks):",
        "while False:",
        (
            "unit/engine/base/test_vacated_memory.py"
            "::test_what_is_being_given_back_is_taken_afterwards",
        ),
    ),
    Mutant(
        "blocks tell their memory that they are in use again",
        POOL,
        "self._memory.take(taken, windowed=True)",
        "pass",
        (READ,),
    ),
)
