"""How many tokens to draft for one sequence. Pure: no clock, no I/O, no torch."""

from __future__ import annotations

# Weight of the latest draft token in the mean.
_WEIGHT = 1 / 8
# A draft token is verified if it is at least this likely to be accepted.
LEAST_LIKELY = 0.3
# Lower bound of the mean, so that one accepted probe is enough to draft again.
_LEAST_SHARE = 0.2
# Steps without drafts before a probe. Each rejected probe doubles them, up to the second number.
FIRST_PAUSE, LONGEST_PAUSE = 16, 256


class DraftDepth:
    """Chooses the depth from the share of accepted tokens, an exponential mean over the draft
    tokens that were verified.

    If each draft token is accepted with probability p given that those before it were, the one at
    place k counts with probability p^k (Leviathan et al., Fast Inference from Transformers via
    Speculative Decoding, 2023). Tokens behind the first wrong one say nothing about p, so they are
    not counted.
    """

    def __init__(self, most: int) -> None:
        """most: the greatest depth, in tokens."""
        self._most = most
        # A new sequence begins with the greatest depth.
        self._share = 1.0
        self._pause = FIRST_PAUSE
        # Steps since the last draft.
        self._without = 0

    @property
    def depth(self) -> int:
        """The tokens to draft now: 0 to `most`."""
        likely, depth = self._share, 0
        while depth < self._most and likely >= LEAST_LIKELY:
            likely *= self._share
            depth += 1
        return depth or int(self._without >= self._pause)

    def learn(self, drafted: int, accepted: int) -> None:
        """Takes in a step that verified `drafted` tokens, of which the first `accepted` were right.
        0 and 0 for a step without a draft.
        """
        if not drafted:
            self._without = min(self._without + 1, LONGEST_PAUSE)
            return
        probed, self._without = self._share < LEAST_LIKELY, 0
        for _ in range(accepted):
            self._share += _WEIGHT * (1 - self._share)
        if accepted < drafted:
            self._share = max(_LEAST_SHARE, (1 - _WEIGHT) * self._share)
        if self._share >= LEAST_LIKELY:
            self._pause = FIRST_PAUSE
        elif probed:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
