"""Where the thinking of an answer ends for lack of budget. Pure.

This depends only on the answer's tokens. So an answer continues in the same way on another worker,
after a preemption, and after rejected drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvrelay.types.requests import SamplingParams, ThinkingMarkers

# Tokens, such as line breaks, that an answer may have before the thinking. Markers after more text
# are text.
_BEFORE = 2


@dataclass(frozen=True, slots=True)
class _Place:
    """The state after some tokens of an answer."""

    begun: bool
    over: bool = False
    # Tokens since the last change of state.
    tokens: int = 0


class ThinkingBudget:
    """The thinking budget of one sequence, in its state after the tokens seen so far. Used by one
    thread at a time.
    """

    def __init__(self, tokens: int, markers: ThinkingMarkers, prompt_len: int) -> None:
        """`tokens`: most tokens of thinking, without the markers."""
        self._tokens = tokens
        self._markers = markers
        # Number of tokens of the sequence that the place includes, with the prompt's.
        self._seen = prompt_len
        self._place = _Place(begun=markers.begin is None)

    def next_tokens(self, token_ids: Sequence[int], num_draft: int = 0) -> Iterator[int | None]:
        """Yields the token that must follow before the first draft and after each draft; None for
        any token.

        `token_ids` is the sequence so far with its drafts, which are its last `num_draft` tokens.
        It begins with the tokens seen before.
        """
        end = len(token_ids) - num_draft
        for index in range(self._seen, end):
            self._place = self._after(self._place, token_ids[index])
        self._seen = end
        place = self._place
        yield self._due(place)
        for index in range(end, len(token_ids)):
            place = self._after(place, token_ids[index])
            yield self._due(place)

    def _after(self, place: _Place, token: int) -> _Place:
        if place.over:
            return place
        if place.begun:
            return _Place(True, over=token == self._markers.end, tokens=place.tokens + 1)
        if token == self._markers.begin:
            return _Place(True)
        return _Place(False, over=place.tokens == _BEFORE, tokens=place.tokens + 1)

    def _due(self, place: _Place) -> int | None:
        spent = place.begun and not place.over and place.tokens >= self._tokens
        return self._markers.end if spent else None


def thinking_budget(params: SamplingParams, prompt_len: int) -> ThinkingBudget | None:
    """Returns the budget of a new sequence, None without one."""
    if params.thinking is None or params.thinking_token_budget is None:
        return None
    return ThinkingBudget(params.thinking_token_budget, params.thinking, prompt_len)
