"""What a step could not do for some of its sequences, while it served the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvrelay.errors import Internal, KvRelayError

if TYPE_CHECKING:
    from kvrelay.engine.sampling.sampler import Sampled


class SequenceFault(Internal):
    """One sequence has no next token: the model's numbers for it are no distribution, or its step
    raises.

    Nothing is said against the others of its batch, nor against the worker until another worker
    does better.
    """


class SegmentsFailed(Exception):
    """Some segments of a step got nothing; the others did, and their KV is stored."""

    def __init__(self, outcomes: Sequence[list[Sampled] | KvRelayError]) -> None:
        failed = [one for one in outcomes if isinstance(one, KvRelayError)]
        super().__init__(
            f"{len(failed)} of {len(outcomes)} segments failed, the first with: {failed[0]}"
        )
        self.outcomes = outcomes  # of each segment: what was sampled, or why nothing was
