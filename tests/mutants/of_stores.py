"""Safeguards of stores that hosts share: whose block a record is, whether it is whole, and which
store may be asked.
"""

from __future__ import annotations

from mutants.mutant import Mutant

SERVICE = "kvrelay/kv_store/service.py"
BLOCKS = "kvrelay/kv_store/block_store.py"
LINK = "kvrelay/worker/tiers/store_link.py"
TIER = "kvrelay/worker/tiers/remote_tier.py"
RING = "kvrelay/worker/tiers/hash_ring.py"
PUTS = "unit/kv_store/test_kv_store_service.py::"
OWN = "unit/kv_store/test_block_store.py::"
RELAY = "unit/worker/tiers/test_remote_relay.py::"
REMOTE = "unit/worker/tiers/test_remote_tier.py::"

MUTANTS = (
    Mutant(
        "the identity of a block that is put",
        SERVICE,
        "header.check(layout, announced[0], header.block_bytes)",
        "header.check(layout, header.identity, header.block_bytes)",
        (f"{PUTS}test_a_block_that_is_not_the_announced_one_is_refused",),
    ),
    Mutant(
        "the digest of a block that is put",
        SERVICE,
        "if xxhash.xxh3_64_intdigest(record[HEADER_BYTES:]) != header.digest:",
        "if False:",
        (f"{PUTS}test_a_block_that_is_not_the_announced_one_is_refused",),
    ),
    Mutant(
        "the version of a worker at a store",
        SERVICE,
        '    ours().check(peer, "the worker")',
        "    return",
        (f"{PUTS}test_names_that_are_none_are_refused",),
    ),
    Mutant(
        "the calls of one connection",
        SERVICE,
        "if counts[peer] >= most:",
        "if False:",
        (f"{PUTS}test_a_connection_has_a_limited_number_of_calls",),
    ),
    Mutant(
        "the tenant whose blocks go first",
        BLOCKS,
        "self._evict(self._largest())",
        "self._evict(next(iter(self._order)))",
        (f"{OWN}test_a_tenant_that_floods_the_store_pushes_out_its_own_blocks",),
    ),
    Mutant(
        "the identity of a block that comes back",
        LINK,
        "header.check(self._layout, missing[0].identity, self._block_bytes)",
        "header.check(self._layout, header.identity, self._block_bytes)",
        (f"{REMOTE}test_another_block_in_its_place_is_not_used",),
    ),
    Mutant(
        "a store that failed is not asked",
        LINK,
        "        self.works = False\n        self._counts.dropped",
        "        self._counts.dropped",
        (f"{REMOTE}test_a_silent_store_is_skipped_until_it_answers",),
    ),
    Mutant(
        "an answer of a store that cannot be read",
        "kvrelay/wire/encoding/fields.py",
        "if message is None:",
        "if False:",
        (f"{REMOTE}test_an_answer_that_cannot_be_read_is_about_its_store_only",),
    ),
    Mutant(
        "the puts of one connection",
        SERVICE,
        "with self._call(context), self._own_put(context):",
        "with self._call(context):",
        (f"{PUTS}test_silent_puts_of_one_connection_hold_up_no_other",),
    ),
    Mutant(
        "blocks for other hosts while memory is free",
        "kvrelay/worker/tiers/tier_store.py",
        "return self._flushing or shared or",
        "return self._flushing or",
        (f"{RELAY}test_another_worker_finds_blocks_while_most_memory_is_free",),
    ),
    Mutant(
        "a block in doubt is not read from a store",
        TIER,
        "if one and one.own is None",
        "if False",
        (f"{REMOTE}test_a_block_in_doubt_is_not_read_also_if_the_store_keeps_it",),
    ),
    Mutant(
        "the blocks of a store that does not work",
        RING,
        "        if works(name):",
        "        if True:",
        (f"{REMOTE}test_a_killed_store_loses_its_blocks_only",),
    ),
    Mutant(
        "a read whose worker does not read ends",
        SERVICE,
        "                async with budget.waiting():\n                    await write(frame)",
        "                await write(frame)",
        (f"{PUTS}test_a_read_whose_worker_does_not_read_ends",),
    ),
    Mutant(
        "a store that is silent for as long as a prompt waits",
        LINK,
        "            if self._clock.now() - began > _FIND_S:",
        "            if False:",
        (f"{REMOTE}test_a_store_is_skipped_that_is_silent_for_as_long_as_a_prompt_waits",),
    ),
    Mutant(
        "a read that was cancelled early says nothing about its store",
        LINK,
        "            if self._clock.now() - began > _FIND_S:",
        "            if True:",
        (f"{REMOTE}test_a_store_is_skipped_that_is_silent_for_as_long_as_a_prompt_waits",),
    ),
    Mutant(
        "a put with a large block waits for less",
        SERVICE,
        "                    arrival.hurry()\n",
        "",
        (f"{PUTS}test_silent_puts_of_large_blocks_do_not_add_up",),
    ),
    Mutant(
        "a store that answers all but reads is skipped for longer each time",
        LINK,
        'if self.works and self._failed_at in (operation, "status"):',
        "if self.works:",
        (f"{REMOTE}test_a_store_that_answers_all_but_reads_is_skipped_for_longer_each_time",),
    ),
    Mutant(
        "a put whose channel was closed does not end the writing",
        LINK,
        "if task_cancelled():",
        "if True:",
        (f"{REMOTE}test_a_put_whose_connection_is_closed_does_not_end_the_writing",),
    ),
    Mutant(
        "a block that came into doubt while it was put is put again",
        LINK,
        "if self._waiting.get(identity) is block:",
        "if identity in self._waiting:",
        (f"{REMOTE}test_a_block_that_comes_into_doubt_while_it_is_put_is_put_again",),
    ),
    Mutant(
        "of a block that was in doubt, only the copy that was offered since is read",
        TIER,
        "if not self._may_use(blocks[number]):",
        "if False:",
        (REMOTE + "test_another_workers_copy_is_not_read_either_if_the_own_one_is_lost",),
    ),
    Mutant(
        "another worker's copy of a block in doubt is forgotten first",
        TIER,
        "self._doom(identity)\n                refused.own",
        "refused.own",
        (REMOTE + "test_another_workers_copy_of_a_block_in_doubt_is_not_read",),
    ),
    Mutant(
        "two workers' copies of a block take each other's place from time to time only",
        TIER,
        "self._clock.now() + _YIELDS_S",
        "0.0",
        (REMOTE + "test_two_workers_do_not_replace_each_others_copies_all_the_time",),
    ),
    Mutant(
        "a read that is under way does not use a block of which a copy is offered",
        TIER,
        "        self._doubts.note(identity)\n        for link",
        "        for link",
        (REMOTE + "test_a_copy_that_is_offered_while_another_one_is_read_stays",),
    ),
    Mutant(
        "the newest doubts are remembered",
        TIER,
        "        self._refused.move_to_end(key.identity)\n",
        "",
        (REMOTE + "test_the_newest_doubts_are_remembered",),
    ),
    Mutant(
        "a second doubt is forgotten again",
        LINK,
        "if self._doomed[identity] == doubt:",
        "if True:",
        (REMOTE + "test_a_block_that_comes_into_doubt_while_it_is_forgotten_is_forgotten_again",),
    ),
)
