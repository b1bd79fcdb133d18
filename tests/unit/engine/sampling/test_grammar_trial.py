"""The child process that tries out grammars."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess

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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_is_asked_again(number: signal.Signals) -> None:
    """As it is when the machine has no memory left: no grammar is to blame."""
    trial = GrammarTrial(DEMO, VOCAB, frozenset({EOS}))
    try:
        trial.warm_up()
        assert trial._process is not None
        os.kill(trial._process.pid, signal.SIGSTOP)
        os.kill(trial._process.pid, number)
        if number is signal.SIGTERM:
            os.kill(trial._process.pid, signal.SIGCONT)
        trial.check(Guidance("regex", "a"))
    finally:
        trial.close()


def test_a_process_that_is_started_beside_many_connections_answers() -> None:
    """Its pipe has a number that select() does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    trial = GrammarTrial(DEMO, VOCAB, frozenset({EOS}))
    opened: list[int] = []
    try:
        while not opened or opened[-1] < 1030:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        trial.check(Guidance("regex", "a"))
        with pytest.raises(InvalidArgument, match="not accepted"):
            trial.check(Guidance("regex", "("))
    finally:
        trial.close()
        for one in opened:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_machine_without_room_for_the_process_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    trial = GrammarTrial(DEMO, VOCAB, frozenset({EOS}))
    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(Unavailable, match="does not start: Resource temporarily unavailable"):
        trial.check(Guidance("regex", "a"))


def test_a_process_that_is_always_killed_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = GrammarTrial(DEMO, VOCAB, frozenset({EOS}))
    started = trial._started

    def stopped() -> subprocess.Popen[bytes]:
        process = started()
        process.kill()
        return process

    monkeypatch.setattr(trial, "_started", stopped)
    try:
        with pytest.raises(Unavailable, match="killed twice"):
            trial.check(Guidance("regex", "a"))
    finally:
        trial.close()
