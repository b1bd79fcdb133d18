"""Safeguards of sequences that drop tokens of their KV."""

from __future__ import annotations

from mutants.mutant import Mutant

BUDGET = "decode_worker/token_budget.py"
EVICTION = "decode_worker/token_eviction.py"
ROOM = "kvrelay/engine/token_eviction/"
UNIT = "unit/decode_worker/test_token_eviction.py::"
COMPACTION = "unit/engine/token_eviction/test_compaction.py::"
LOGITS = "unit/engine/token_eviction/test_evicted_sequences.py::"

MUTANTS = (
    Mutant(
        "a step ends where the sequence evicts",
        BUDGET,
        "min((end for end in ends if end > sequence.num_computed), default=sys.maxsize)",
        "sys.maxsize",
        (
            UNIT + "test_answers_do_not_depend_on_others_memory_or_drafts",
            UNIT + "test_a_sequence_goes_on_elsewhere_as_it_would_have",
        ),
    ),
    Mutant(
        "no step drafts across an eviction",
        "decode_worker/scheduler.py",
        "room = min(room, self._token_budget.most_drafts(sequence))",
        "pass",
        (UNIT + "test_answers_do_not_depend_on_others_memory_or_drafts",),
    ),
    Mutant(
        "blocks that others read are not written",
        EVICTION,
        "if pool.hash_of(block) is not None or pool.num_holds(block) > 1",
        "if False",
        (UNIT + "test_a_shared_prefix_stays_whole",),
    ),
    Mutant(
        "a compacted block is no prefix of another sequence",
        "kvrelay/worker/sequence.py",
        "            self.num_computed += num_tokens\n            return\n",
        "",
        (UNIT + "test_answers_do_not_depend_on_others_memory_or_drafts",),
    ),
    Mutant(
        "the first block and the last tokens are kept",
        ROOM + "evictor.py",
        "kept = (positions < self._size) | (positions > positions.max() - RECENT)",
        "kept = positions < 0",
        (LOGITS + "test_logits_are_those_of_masked_tokens",),
    ),
    Mutant(
        "positions are those of the whole sequence",
        "kvrelay/engine/base/step_input.py",
        "part.dropped + place for part",
        "place for part",
        (LOGITS + "test_logits_are_those_of_masked_tokens",),
    ),
    Mutant(
        "a block that others read is copied before rows move into it",
        ROOM + "compaction.py",
        "if holes[place] and place in fixed]",
        "if False]",
        (COMPACTION + "test_what_is_kept_fills_whole_blocks",),
    ),
    Mutant(
        "the emptiest blocks are freed",
        ROOM + "compaction.py",
        "key=lambda place: (-len(holes[place]), -place)",
        "key=lambda place: (len(holes[place]), -place)",
        (COMPACTION + "test_few_rows_move",),
    ),
    Mutant(
        "a step waits for one eviction at most",
        EVICTION,
        "for one in active()):\n                break\n",
        "for one in active()):\n                continue\n",
        (UNIT + "test_a_step_waits_for_one_eviction_at_most",),
    ),
    Mutant(
        "a sequence that cannot be compacted fails alone",
        EVICTION,
        "            failure = error\n",
        "            raise\n",
        (UNIT + "test_a_sequence_that_cannot_be_compacted_fails_alone",),
    ),
    Mutant(
        "a sequence that dropped tokens goes on at a decode worker",
        "router/core/path_policy.py",
        "if drops_tokens:",
        "if False:",
        ("unit/router/core/test_path_policy.py::test_a_sequence_that_dropped_tokens_stays_local",),
    ),
    Mutant(
        "the text that tells where queries lie fits the longest sequence",
        ROOM + "query_centres.py",
        "min(LENGTH, max_model_len - _APART,",
        "min(LENGTH,",
        (LOGITS + "test_triattention_measures_within_the_longest_sequence",),
    ),
)
