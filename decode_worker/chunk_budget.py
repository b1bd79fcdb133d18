"""How many prompt tokens a decode worker computes in a step. Pure: no clock, no I/O, no torch."""

from __future__ import annotations

from kvrelay.prompt_rate import PromptRate, chunk_within

# Chunks over which the rate is averaged. It follows the context of a prompt.
_AVERAGED_CHUNKS = 4
# Weight of a new step in the average of the steps without prompts.
_NEW = 0.2


class ChunkBudget:
    """Learns what steps cost, and bounds the prompt tokens of a step so that the sequences that
    decode in it keep their ITL.
    """

    def __init__(self, most: int, least: int) -> None:
        """most, least: bounds of the prompt tokens of a step."""
        self._most = most
        self._least = least
        self._rate = PromptRate(_AVERAGED_CHUNKS * most)
        # Seconds of a step without prompts; 0 before the first.
        self.step_s = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Rate of prompt tokens in the time that they add to steps; 0 before the first prompt."""
        return self._rate.per_second

    def ended(self, decoding: bool, prompt_tokens: int, seconds: float) -> None:
        """Records a step. decoding: whether sequences decoded in it."""
        if prompt_tokens:
            alone = self.step_s if decoding else 0.0
            self._rate.add(prompt_tokens, max(0.0, seconds - alone))
        # Without the prompts, the step would not have taken longer.
        if decoding and (not prompt_tokens or seconds < self.step_s):
            self.step_s += (_NEW if self.step_s else 1.0) * (seconds - self.step_s)

    def tokens(self, itl_s: float | None) -> int:
        """Returns the most prompt tokens of the next step. itl_s: the smallest ITL in seconds that
        the sequences that decode in it ask for; None if none asks.
        """
        if itl_s is None:
            return self._most
        within = chunk_within(self._most, itl_s, self.step_s, self.tokens_per_second)
        return max(self._least, within)
