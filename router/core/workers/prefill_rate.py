"""How fast a prefill worker computes prompts."""

from __future__ import annotations

# Tokens over which the rate is averaged.
AVERAGED_TOKENS = 8192


class PrefillRate:
    """The rate of a worker in prompt tokens per second, over its recent prompts.

    Prompts that share steps overlap. Their times must be given without the overlap.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Adds a computed prompt, and the time since the prompt before it ended or it began."""
        kept = max(0.0, 1 - tokens / AVERAGED_TOKENS)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds

    @property
    def per_second(self) -> float:
        """Tokens per second; 0 before the first measurement."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0
