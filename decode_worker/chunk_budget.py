"""How many prompt tokens a decode worker computes in a step. Pure: no clock, no I/O, no torch."""

from __future__ import annotations

from kvrelay.worker.steps.prompt_rate import PromptRate

# Part of the ITL at which a step aims. The rest is for steps that take longer than the last one and
# for the way to the client.
_STEP_SHARE = 0.85
# Weight of a new step in the average of the steps without prompts.
_NEW = 0.2
# A step corrects the budget of the next one by at most this factor, so that one odd step has little
# effect.
_MOST_CHANGE = 2.0
# Shortest time of a step, in seconds, for a clock that stood still.
_LEAST_S = 1e-6


class ChunkBudget:
    """Bounds the prompt tokens of a step so that the sequences that decode in it keep their ITL.

    The first step with prompts gets what the steps without prompts have left. Each further one is
    corrected by the time that the last one took, so the budget follows batch and context without a
    model of their costs.

    A sequence that comes from a prefill worker has waited for the end of a step before its own
    first step. That step gets fewer prompt tokens, or none, so that both together keep the ITL.
    """

    def __init__(self, most: int, least: int) -> None:
        """most, least: bounds of the prompt tokens of a step that also decodes. Such a step gets a
        multiple of `least`.
        """
        self._most = most
        self._least = least
        self._rate = PromptRate(least)
        # Seconds of a step without prompts; 0 before the first.
        self._step_s = 0.0
        # Budget of the last step.
        self._given = least
        # Prompt tokens and seconds of the last step; None if no sequence decoded in it.
        self._last: tuple[int, float] | None = None
        # Whether the last step got fewer prompt tokens than the budget for a sequence that joined,
        # and whether it got none.
        self._is_cut = self._paused = False

    def tokens(self, itl_s: float | None, waited_s: float, now: float) -> int:
        """Returns the most prompt tokens of the next step.

        - itl_s: the smallest ITL in seconds that the sequences that decode in it, or are expected,
          ask for; None if there are none or none asks.
        - waited_s: for how long a sequence has waited for its first step, which this one is; 0 if
          none has. After a step without prompt tokens, there are some.
        """
        if itl_s is None:
            self._is_cut = self._paused = False
            return self._most
        wanted = self._estimate(_STEP_SHARE * itl_s, now)
        # Steps of the same size are faster, and a chunk should fill its blocks.
        self._given = self._whole_blocks(self._within(wanted))
        prompts_s = _STEP_SHARE * itl_s - self._step_s
        if waited_s <= 0 or prompts_s <= 0 or self._paused:
            self._is_cut = self._paused = False
            return self._given
        left = max(0.0, 1 - waited_s / prompts_s)
        tokens = min(self._given, self._whole_blocks(left * max(wanted, self._given)))
        self._is_cut, self._paused = tokens < self._given, tokens == 0
        return tokens

    def ended(self, decoding: bool, prompt_tokens: int, seconds: float, now: float) -> None:
        """Records a step. decoding: whether sequences decoded in it."""
        if not decoding:
            self._rate.add(prompt_tokens, seconds, now)
            self._last = None
            return
        if not prompt_tokens:
            self._step_s += (_NEW if self._step_s else 1.0) * (seconds - self._step_s)
        elif self._last is not None and not self._last[0]:
            # The step before had the same sequences, which the average may not have.
            self._rate.add(prompt_tokens, seconds - self._last[1], now)
        self._last = prompt_tokens, seconds

    def tokens_per_second(self, itl_s: float | None, answering: float, now: float) -> float | None:
        """Returns the rate at which a prompt will be computed: 0 if the answers alone take all of
        their ITL, None if unknown.

        - itl_s: as for `tokens`, of the sequences that decode or will.
        - answering: share of the time in which sequences decode, 0 to 1.
        """
        rate = self._known_rate(now)
        beside = self._beside_answers(rate, itl_s, now)
        if not beside or rate is None:
            return beside
        return answering * beside + (1 - answering) * rate

    def _beside_answers(self, rate: float | None, itl_s: float | None, now: float) -> float | None:
        tokens, seconds = self._last or (0, 0.0)
        if tokens >= self._least:
            answers_s = seconds - tokens / rate if rate else self._step_s
            return 0.0 if self._takes_all(answers_s, itl_s) else tokens / max(seconds, _LEAST_S)
        if self._takes_all(self._step_s, itl_s):
            return 0.0
        if rate is None or itl_s is None:
            return rate
        tokens_now = self._within(self._estimate(_STEP_SHARE * itl_s, now))
        return tokens_now / (self._step_s + tokens_now / rate)

    def _known_rate(self, now: float) -> float | None:
        """The rate of prompts alone. Without a recent measurement, the last one counts: the worker
        is as fast as it was, and what its answers take is known.
        """
        return self._rate.per_second(now) or self._rate.latest

    def _whole_blocks(self, tokens: float) -> int:
        return int(tokens // self._least) * self._least

    @staticmethod
    def _takes_all(answers_s: float, itl_s: float | None) -> bool:
        return itl_s is not None and answers_s >= _STEP_SHARE * itl_s

    def _within(self, tokens: float) -> float:
        return min(self._most, max(self._least, tokens))

    def _estimate(self, aim_s: float, now: float) -> float:
        rate = self._known_rate(now) or 0.0
        tokens, seconds = self._last or (0, 0.0)
        if not tokens:
            return (aim_s - self._step_s) * rate
        if seconds > aim_s:
            budget = self._given if self._is_cut else tokens
            return max(tokens * aim_s / seconds, budget / _MOST_CHANGE)
        if tokens < self._given:
            # The prompts were shorter than the budget, so it was not tried out.
            return self._given
        # A token adds at most the mean time of a token.
        more = (aim_s - seconds) * max(rate, tokens / max(seconds, _LEAST_S))
        return tokens + min(more, (_MOST_CHANGE - 1) * tokens)
