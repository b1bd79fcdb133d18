"""Which tokens may follow the tokens of one answer. Pure.

The state of a grammar is a function of the answer's tokens. So an answer continues in the same way
on another worker, after a preemption, and after rejected drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from kvrelay.engine.sampling.grammar import refusal
from kvrelay.errors import InvalidArgument


class Matcher:
    """The grammar of one sequence, in its state after the tokens seen so far. Used by one thread at
    a time.
    """

    def __init__(self, state: LLMatcher, width: int, prompt_len: int, eos: frozenset[int]) -> None:
        """`width`: 32-bit words of a mask."""
        self.width = width
        # Masks that took too long.
        self.slow_masks = 0
        self._state = state
        self._eos_token_ids = eos
        # Number of tokens of the sequence that the state includes, with the prompt's.
        self._seen = prompt_len

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes in new tokens of the sequence. `token_ids` begins with the tokens seen before.

        Raises InvalidArgument for a token that does not follow the grammar.
        """
        new = list(token_ids[self._seen :])
        taken = self._state.try_consume_tokens(new) if new else 0
        self._seen += taken
        if self._state.is_error():
            raise refusal(self._state.get_error())
        if taken < len(new):
            raise InvalidArgument(
                f"token {new[taken]} at position {self._seen} does not follow guidance; resume an "
                "answer only with the guidance that it began with",
                field="guidance",
            )

    def fill(
        self, masks: NDArray[np.int32], token_ids: Sequence[int], num_draft: int = 0
    ) -> tuple[int, InvalidArgument] | None:
        """Writes the masks [num_draft + 1, width] of the tokens that may follow before the first
        draft and after each draft. Bit i of word w is token 32 w + i.

        `token_ids` is the sequence so far with its drafts, which are its last `num_draft` tokens.
        Leaves out the masks after a draft that may not follow, and after the end of an answer.
        Returns the first mask that failed, with its error; the masks after it are left out.
        """
        end = len(token_ids) - num_draft
        place = 0
        try:
            self.advance(token_ids[:end])
            with self._restored() as drafts:
                self._write(masks[0])
                for place, draft in enumerate(token_ids[end:], 1):
                    if draft in self._eos_token_ids or not self._state.try_consume_tokens([draft]):
                        break
                    drafts.append(draft)
                    self._write(masks[place])
        except InvalidArgument as error:
            return place, error
        return None

    @contextmanager
    def _restored(self) -> Iterator[list[int]]:
        """Takes back the tokens in the yielded list."""
        consumed: list[int] = []
        try:
            yield consumed
        finally:
            if consumed:
                self._state.rollback(len(consumed))

    def _write(self, mask: NDArray[np.int32]) -> None:
        self._state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._state.is_error():
            raise refusal(self._state.get_error())
        if not mask.any():
            raise refusal("the grammar allows no further token")
