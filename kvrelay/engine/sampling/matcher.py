"""Which tokens may follow the tokens of one answer. Pure.

The state of a grammar is a function of the answer's tokens. So an answer continues in the same way
on another worker, after a preemption, and after rejected drafts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from kvrelay.engine.sampling.grammar import refusal
from kvrelay.errors import InvalidArgument

if TYPE_CHECKING:
    from kvrelay.engine.sampling.grammar_time import GrammarTime


class Compiled:
    """A compiled grammar at the beginning of an answer. The matchers of its answers share what it
    remembers, which grows with them.
    """

    def __init__(self, build: Callable[[], LLMatcher]) -> None:
        """build: compiles the grammar. Called here, and again for an answer whose grammar has
        remembered too much. Raises InvalidArgument.
        """
        self.build = build
        # The most tokens that its answers have together.
        self.num_tokens = 0
        self._begin = build()

    def copy(self) -> LLMatcher:
        """Returns the state at the beginning of an answer."""
        return self._begin.deep_copy()


class Matcher:
    """The grammar of one sequence, in its state after the tokens seen so far. Used by one thread at
    a time.
    """

    def __init__(
        self,
        compiled: Compiled,
        width: int,
        prompt_len: int,
        eos: frozenset[int],
        allowance: GrammarTime,
    ) -> None:
        """`width`: 32-bit words of a mask. `allowance`: of the sequence's tenant."""
        self.width = width
        self.allowance = allowance
        self._compiled = compiled
        self._state = compiled.copy()
        self._eos_token_ids = eos
        self._prompt_len = prompt_len
        # Number of tokens of the sequence that the state includes, with the prompt's.
        self._seen = prompt_len

    def advance(self, token_ids: Sequence[int], end: int) -> None:
        """Takes in the tokens of the sequence before `end`, one at a time, since a call keeps all
        other threads waiting. Raises InvalidArgument for a token that does not follow the grammar.
        """
        while self._seen < end:
            self._take(token_ids, self._seen)
            self._seen += 1

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
            self.advance(token_ids, end)
            with self._restored() as drafts:
                self._write(masks[0], token_ids, end)
                for place, draft in enumerate(token_ids[end:], 1):
                    if draft in self._eos_token_ids or not _allows(masks[place - 1], draft):
                        break
                    self._take(token_ids, end + place - 1)
                    drafts.append(draft)
                    self._write(masks[place], token_ids, end + place)
        except InvalidArgument as error:
            return place, error
        return None

    def _take(self, token_ids: Sequence[int], place: int) -> None:
        """Takes in one token, after those before it. Raises InvalidArgument if it does not follow
        the grammar.
        """
        token = token_ids[place]
        if self._state.try_consume_tokens([token]):
            return
        # A grammar that has remembered too much takes in no token, and does not say why.
        self._renew(token_ids, place)
        if not self._state.try_consume_tokens([token]):
            self._check()
            raise InvalidArgument(
                f"token {token} at position {place} does not follow guidance; resume an answer "
                "only with the guidance that it began with",
                field="guidance",
            )

    def _write(self, mask: NDArray[np.int32], token_ids: Sequence[int], end: int) -> None:
        """Writes the mask of the tokens that may follow the tokens before `end`."""
        self._state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._state.is_error():
            self._renew(token_ids, end)
            self._state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._check()
        if not mask.any():
            raise refusal("the grammar allows no further token")

    def _renew(self, token_ids: Sequence[int], end: int) -> None:
        """Compiles the grammar again, for this answer alone, and takes in the tokens before `end`.
        What a grammar has remembered, also of other answers, counts for its limits, and must not
        end this one. Raises InvalidArgument if it cannot go on, and if the tenant's time is over.
        """
        if self.allowance.is_over:
            raise refusal(
                "it has to be compiled again, and the tenant's grammars have taken all of the time "
                "that they may; use shorter patterns"
            )
        self._compiled.num_tokens = sys.maxsize
        self._compiled = Compiled(self._compiled.build)
        self._state = self._compiled.copy()
        for token in islice(token_ids, self._prompt_len, end):
            if not self._state.try_consume_tokens([token]):
                self._check()
                raise refusal("the answer so far is too long for it; use shorter patterns")

    def _check(self) -> None:
        """Raises InvalidArgument if the state is of no use any more."""
        if self._state.is_error():
            raise refusal(self._state.get_error())

    @contextmanager
    def _restored(self) -> Iterator[list[int]]:
        """Takes back the tokens in the yielded list."""
        consumed: list[int] = []
        try:
            yield consumed
        finally:
            if consumed:
                self._state.rollback(len(consumed))


def _allows(mask: NDArray[np.int32], token: int) -> bool:
    return bool(mask[token // 32] >> token % 32 & 1)
