"""Safeguards of speculation: drafts cannot change answers, and what they take comes back."""

from __future__ import annotations

from mutants.mutant import Mutant

PROPOSER = "decode_worker/draft_model.py"
KV_TEST = (
    "unit/decode_worker/test_draft_model.py::test_the_kv_is_that_of_the_tokens_whatever_is_accepted"
)
REFUSED = (
    "unit/decode_worker/test_draft_speculation.py"
    "::test_a_draft_model_that_does_not_fit_is_refused_in_one_sentence"
)

MUTANTS = (
    Mutant(
        "the texts of other salts are not drafted from",
        "decode_worker/suffix.py",
        "return sequence.spec.salt, sequence.spec.adapter",
        'return "", ""',
        (
            "unit/decode_worker/test_speculation.py"
            "::test_an_earlier_answer_is_drafted_from_if_its_salt_is_the_same",
        ),
    ),
    Mutant(
        "earlier texts are forgotten in time",
        "decode_worker/suffix.py",
        "self._old, self._young, self._tokens = self._young, {}, 0",
        "pass",
        ("unit/decode_worker/test_suffix.py::test_old_texts_are_forgotten_and_memory_is_bounded",),
    ),
    Mutant(
        "the draft model's KV of a wrong draft is computed again",
        "decode_worker/proposer.py",
        "if index >= len(tokens) or tokens[index] != draft:",
        "if index >= len(tokens):",
        (KV_TEST,),
    ),
    Mutant(
        "a draft is for the tokens that it was computed from",
        PROPOSER,
        "if kv is None or kv.length != len(sequence.tokens):",
        "if kv is None:",
        (KV_TEST,),
    ),
    Mutant(
        "an ended sequence gives back the draft model's blocks",
        PROPOSER,
        "self._pool.release(kv.blocks)",
        "pass",
        (KV_TEST,),
    ),
    Mutant(
        "the draft model of another vocabulary is refused",
        "kvrelay/worker/runtime/draft_files.py",
        "if None not in (found[0], served[0]) and found[0] != served[0]:",
        "if False:",
        (REFUSED,),
    ),
    Mutant(
        "the draft model of another tokenizer is refused",
        "kvrelay/worker/runtime/draft_files.py",
        "if found[1] != served[1]:",
        "if False:",
        (REFUSED,),
    ),
    Mutant(
        "a draft model that fails ends no answer",
        PROPOSER,
        "except Exception as error:",
        "except ZeroDivisionError as error:",
        (
            "unit/decode_worker/test_draft_speculation.py"
            "::test_a_draft_model_that_fails_ends_no_answer",
        ),
    ),
    Mutant(
        "a proposer that is always wrong is seldom asked",
        "decode_worker/draft_depth.py",
        "return depth or int(self._without >= self._pause)",
        "return max(depth, 1)",
        ("unit/decode_worker/test_drafter.py::test_what_is_always_wrong_is_seldom_drafted",),
    ),
)
