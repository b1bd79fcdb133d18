from __future__ import annotations

import pytest

from kvrelay.bench.cases import Cases, DecodeCase, PrefillCase, all_cases, quick_cases, that_fit
from kvrelay.bench.engine_bench import DECODE_STEPS, measure, tokens_beyond
from kvrelay.errors import InvalidArgument

Call = tuple[str, str, object]


class ScriptedEngine:
    """Writes down what it is told, and says that its nth call took n seconds."""

    def __init__(self, name: str, calls: list[Call]) -> None:
        self.name = name
        self.calls = calls
        self.count = 0
        self.open_lengths: list[int] = []

    def prefill(self, prompt: list[int]) -> float:
        return self._called("prefill", tuple(prompt))

    def open(self, prompts: list[list[int]]) -> None:
        self.calls.append((self.name, "open", tuple(map(tuple, prompts))))
        self.open_lengths = [len(prompt) for prompt in prompts]
        self.count = 0

    def decode(self, steps: int) -> float:
        self.open_lengths = [length + steps for length in self.open_lengths]
        return self._called("decode", steps) * steps

    def close(self) -> None:
        self.calls.append((self.name, "close", None))

    def _called(self, what: str, argument: object) -> float:
        self.calls.append((self.name, what, argument))
        self.count += 1
        return float(self.count)


def test_engines_take_turns_with_the_same_prompts_and_the_first_run_does_not_count() -> None:
    calls: list[Call] = []
    engines = [ScriptedEngine("a", calls), ScriptedEngine("b", calls)]
    done: list[None] = []
    (result,) = measure(
        [PrefillCase(5)], engines, runs=3, vocab_size=100, done=lambda: done.append(None)
    )
    assert [name for name, _, _ in calls] == ["a", "b"] * 4
    prompts = [prompt for _, _, prompt in calls]
    assert prompts[::2] == prompts[1::2]
    assert len(set(prompts)) == 4
    assert result.seconds == {"a": (2.0, 3.0, 4.0), "b": (2.0, 3.0, 4.0)}
    assert result.median("a") == 3.0
    assert len(done) == 1


def test_a_batch_is_opened_once_and_stepped_in_turns() -> None:
    calls: list[Call] = []
    engines = [ScriptedEngine("a", calls), ScriptedEngine("b", calls)]
    (result,) = measure([DecodeCase(3, 128)], engines, runs=2, vocab_size=100, done=lambda: None)
    assert [(name, what) for name, what, _ in calls] == [
        ("a", "open"), ("b", "open"), *[("a", "decode"), ("b", "decode")] * 3, ("a", "close"),
        ("b", "close"),
    ]  # fmt: skip
    assert calls[0][2] == calls[1][2]
    assert len(engines[0].open_lengths) == 3
    assert result.seconds == {"a": (2.0, 3.0), "b": (2.0, 3.0)}


@pytest.mark.parametrize("runs", [1, 2, 5, 8])
def test_the_context_is_the_mean_over_the_runs_that_count(runs: int) -> None:
    engine = ScriptedEngine("a", [])
    measure([DecodeCase(1, 128)], [engine], runs=runs, vocab_size=100, done=lambda: None)
    (after,) = engine.open_lengths
    assert after - runs * DECODE_STEPS / 2 == 128
    assert after <= 128 + tokens_beyond(runs)


def test_the_same_prompts_come_in_every_measurement() -> None:
    first: list[Call] = []
    second: list[Call] = []
    for calls in (first, second):
        measure(
            [PrefillCase(5), DecodeCase(2, 128)], [ScriptedEngine("a", calls)], 2, 100, lambda: None
        )
    assert first == second


def test_cases_that_do_not_fit_are_left_out() -> None:
    fit = that_fit(all_cases(), 600)
    assert [case.tokens for case in fit.prefill] == [128, 512]
    assert {case.context for case in fit.decode} == {128}
    assert (fit.longest, fit.most_batch, fit.most_tokens) == (512, 32, 32 * 128)
    with pytest.raises(InvalidArgument, match="100 tokens"):
        that_fit(quick_cases(), 100)


def test_one_long_prompt_may_hold_more_than_a_batch() -> None:
    assert Cases((PrefillCase(4096),), (DecodeCase(4, 128),)).most_tokens == 4096
