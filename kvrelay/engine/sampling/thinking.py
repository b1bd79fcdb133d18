"""Where the thinking of an answer ends for lack of budget. Pure.

This depends only on the answer's tokens. So an answer continues in the same way on another worker,
after a preemption, and after rejected drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvrelay.types.requests import SamplingParams, ThinkingMarkers
from kvrelay.types.thinking import ThinkingPlace


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
        self._place = ThinkingPlace.at_start(markers)

    def next_tokens(self, token_ids: Sequence[int], num_draft: int = 0) -> Iterator[int | None]:
        """Yields the token that must follow before the first draft and after each draft; None for
        any token.

        `token_ids` is the sequence so far with its drafts, which are its last `num_draft` tokens.
        It begins with the tokens seen before.
        """
        end = len(token_ids) - num_draft
        for index in range(self._seen, end):
            self._place = self._place.after(token_ids[index], self._markers)
        self._seen = end
        place = self._place
        yield self._due(place)
        for index in range(end, len(token_ids)):
            place = place.after(token_ids[index], self._markers)
            yield self._due(place)

    def _due(self, place: ThinkingPlace) -> int | None:
        spent = place.begun and not place.over and place.tokens >= self._tokens
        return self._markers.end if spent else None


def thinking_budget(params: SamplingParams, prompt_len: int) -> ThinkingBudget | None:
    """Returns the budget of a new sequence, None without one."""
    if params.thinking is None or params.thinking_token_budget is None:
        return None
    return ThinkingBudget(params.thinking_token_budget, params.thinking, prompt_len)
