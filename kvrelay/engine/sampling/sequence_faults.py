"""Errors of single sequences in a step that succeeded for the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvrelay.errors import Internal, KvRelayError

if TYPE_CHECKING:
    from kvrelay.engine.sampling.sampler import Sampled


class SequenceFault(Internal):
    """One sequence has no next token: its logits are no distribution, or its step raises.

    The error does not implicate the other sequences of the batch. It implicates the worker only
    once another worker succeeds with the same sequence.
    """


class SegmentsFailed(Exception):
    """Some segments of a step failed. The others succeeded, and their KV is stored."""

    def __init__(self, outcomes: Sequence[list[Sampled] | KvRelayError]) -> None:
        failed = [outcome for outcome in outcomes if isinstance(outcome, KvRelayError)]
        super().__init__(
            f"{len(failed)} of {len(outcomes)} segments failed, the first with: {failed[0]}"
        )
        # For each segment, the sampled tokens or the error.
        self.outcomes = outcomes
