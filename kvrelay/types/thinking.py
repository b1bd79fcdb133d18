"""Where the thinking in an answer begins and ends. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.types.requests import ThinkingMarkers

# Tokens, such as line breaks, that an answer may have before the thinking. Markers after more text
# are text.
_BEFORE = 2


@dataclass(frozen=True, slots=True)
class ThinkingPlace:
    """The state after some tokens of an answer. It depends only on these tokens, so it is the same
    on another worker, after a preemption, and after rejected drafts.
    """

    begun: bool
    over: bool = False
    # Tokens before the thinking, or of the thinking. Markers do not count.
    tokens: int = 0

    @classmethod
    def at_start(cls, markers: ThinkingMarkers) -> ThinkingPlace:
        """Returns the state before the first token of an answer."""
        return cls(begun=markers.begin is None)

    @property
    def thought(self) -> int:
        """Number of tokens of the thinking."""
        return self.tokens if self.begun else 0

    def after(self, token: int, markers: ThinkingMarkers) -> ThinkingPlace:
        """Returns the state after the next token."""
        if self.over:
            return self
        if self.begun and token == markers.end:
            return ThinkingPlace(True, True, self.tokens)
        if self.begun:
            return ThinkingPlace(True, False, self.tokens + 1)
        if token == markers.begin:
            return ThinkingPlace(True)
        return ThinkingPlace(False, self.tokens == _BEFORE, self.tokens + 1)
