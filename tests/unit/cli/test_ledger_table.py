"""The printed ledger."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvrelay.cli.views.render import ledger_table
from kvrelay.client import Completion
from kvrelay.types.requests import Attempt, Handoff, Ledger, Usage


def shown(ledger: Ledger, width: int = 80) -> str:
    completion = Completion(
        request_id="r",
        text="",
        token_ids=(1, 2),
        logprobs=(),
        finish_reason="length",
        usage=Usage(3, 0, 2),
        path="local",
        why="it is short",
        ledger=ledger,
        ttft_seconds=1.0,
        e2e_seconds=3.0,
        calls=1,
    )
    out = io.StringIO()
    Console(file=out, width=width, markup=False, highlight=False).print(ledger_table(completion))
    return out.getvalue()


FAILED_OVER = Ledger(
    phases=(("queue", 0.75), ("prefill", 1.0), ("failed_attempt", 0.25)),
    ttft_seconds=2.0,
    e2e_seconds=3.0,
    attempts=(
        Attempt(
            *("disaggregated", "", "prefill-0", "decode-0", "decode-0 was lost"),
            (("queue", 0.5), ("failed_attempt", 0.25)),
        ),
        Attempt(
            *("local", "", "", "decode-1", "finished"),
            (("queue", 0.25), ("prefill", 1.0), ("decode", 1.0)),
        ),
    ),
)


@pytest.mark.parametrize("width", [80, 40])
def test_each_attempt_shows_its_own_time(width: int) -> None:
    text = " ".join(shown(FAILED_OVER, width).split())
    assert "sum of all attempts" in " ".join(re.sub("[┃│]", " ", text).split())
    assert (
        "attempt 1 on prefill-0 and decode-0, 750.0 ms: decode-0 was lost "
        "queue 500.0 ms, failed_attempt 250.0 ms "
        "attempt 2 on decode-1, 2250.0 ms: finished "
        "queue 250.0 ms, prefill 1000.0 ms, decode 1000.0 ms "
        "all attempts, from the arrival to the last token: 3000.0 ms"
    ) in text


@pytest.mark.parametrize(
    ("seconds", "exposed", "cached", "words"),
    [
        (0.0117, 0.0117, 0, "all of it after the prefill"),
        (0.0117, 0.0039, 0, "3.9 ms of it after the prefill"),
        (0.0117, 0.0, 2, "0.0 ms of it after the prefill; the decode worker had 2 more already"),
    ],
)
def test_a_handoff_is_told_in_one_sentence(
    seconds: float, exposed: float, cached: int, words: str
) -> None:
    handoff = Handoff("shm", 3, 1024, 3072, cached, seconds, exposed)
    told = " ".join(shown(Ledger(handoff=handoff), 200).splitlines()[-1].split())
    assert told == f"hand-off over shm: 3 blocks x 1 KiB = 3 KiB in 11.7 ms, {words}"


def test_a_router_of_an_older_release_sends_no_phases_of_attempts() -> None:
    old = [Attempt("local", "", "", worker, "finished") for worker in ("d-0", "d-1")]
    text = shown(Ledger(attempts=tuple(old)))
    assert "attempt 2 on d-1: finished" in text
    assert "all attempts," not in text


PHASES: Any = st.lists(st.tuples(st.text(max_size=9), st.floats(0, 1e4)), max_size=4).map(tuple)


@given(phases=PHASES, attempts=st.lists(PHASES, max_size=4), width=st.integers(20, 120))
def test_no_ledger_is_too_odd_to_print(phases: Any, attempts: list[Any], width: int) -> None:
    several = tuple(Attempt("local", "", "", "d", "finished", one) for one in attempts)
    text = shown(Ledger(phases=phases, attempts=several), width)
    assert text.count("attempt ") >= (len(several) if len(several) > 1 else 0)
