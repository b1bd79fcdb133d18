"""The child process that tries out grammars."""

from __future__ import annotations

import pytest
from support.guided_model import DEMO, EOS, VOCAB

from kvrelay.engine.sampling import grammar_trial
from kvrelay.engine.sampling.grammar_trial import GrammarTrial
from kvrelay.errors import InvalidArgument, Unavailable
from kvrelay.types.requests import Guidance


def test_a_start_that_takes_too_long_leaves_no_answer_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = GrammarTrial(DEMO, VOCAB, frozenset({EOS}))
    try:
        with monkeypatch.context() as patched:
            patched.setattr(grammar_trial, "_START_S", 0.0)
            with pytest.raises(Unavailable, match="gave no answer within 0 s"):
                trial.check(Guidance("regex", "a"))
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="not accepted"):
                trial.check(Guidance("regex", "("))
            trial.check(Guidance("regex", "a"))
    finally:
        trial.close()
