"""How fast a worker computes prompts, and how much of a prompt fits beside a decode batch."""

from __future__ import annotations

# Part of the ITL that a step may take. The rest is for the way to the client.
STEP_SHARE = 0.9


class PromptRate:
    """The rate of a worker in prompt tokens per second, over its recent prompts.

    Prompts that share steps overlap. Their times must be given without the overlap.
    """

    def __init__(self, averaged_tokens: int = 8192) -> None:
        """averaged_tokens: the most recent tokens, over which the rate is averaged."""
        self._averaged_tokens = averaged_tokens
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Adds computed tokens of prompts and the time that they took."""
        kept = max(0.0, 1 - tokens / self._averaged_tokens)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds

    @property
    def per_second(self) -> float:
        """Tokens per second; 0 before the first measurement."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


def least_chunk(chunk_tokens: int, block_size: int) -> int:
    """Returns the fewest prompt tokens of a step with prompts. Fewer would not be worth the step's
    fixed cost.
    """
    return min(chunk_tokens, max(block_size, chunk_tokens // 8))


def chunk_within(most: int, itl_s: float, step_s: float, tokens_per_second: float) -> int:
    """Returns the prompt tokens, at most `most`, that a step can compute within the ITL, beside a
    decode batch that takes `step_s` alone. 0 if the batch leaves no time.
    """
    if not tokens_per_second:
        return 0
    return int(max(0.0, min(most, (STEP_SHARE * itl_s - step_s) * tokens_per_second)))
