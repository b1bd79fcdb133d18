"""The part of a sequence that one step computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvrelay.engine.base.step_input import Queries
from kvrelay.engine.sampling.prompt_scores import PromptScores
from kvrelay.engine.sampling.sampler import Sampled, SampleRequest
from kvrelay.errors import InvalidArgument, KvRelayError
from kvrelay.types.kv_layout import KvLayout


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive new tokens of one sequence, the first at position `start`. The KV of all earlier
    tokens but `dropped` is in `blocks`, in any order.

    `blocks` is the sequence's block table and reaches at least to the last new token. With
    `sample`, a token is sampled from the logits after the last new token.

    The last `num_draft` tokens are drafts. A token is sampled after the token before the drafts and
    after each draft, on the assumption that the earlier drafts are right. Samples after the first
    wrong draft are discarded. The token ids of `sample` include all drafts.

    With `scores`, the log-probabilities of the prompt's tokens are added to it. With `queries`, the
    queries of the new tokens are added to that.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: SampleRequest | None = None
    num_draft: int = 0
    scores: PromptScores | None = None
    # Id of the sequence's adapter; empty for the base model.
    adapter: str = ""
    dropped: int = 0
    queries: Queries | None = None

    @property
    def past(self) -> int:
        """Tokens before the segment that have KV."""
        return self.start - self.dropped

    @property
    def scored(self) -> range:
        """The positions after which a token of the prompt is scored."""
        if self.scores is None:
            return range(0)
        return self.scores.rows(self.start, self.start + len(self.token_ids))

    @property
    def draws(self) -> list[SampleRequest]:
        """A request for each token to sample, with the tokens before it."""
        if self.sample is None or not self.num_draft:
            return [self.sample] if self.sample is not None else []
        seen = self.sample.token_ids
        ends = range(len(seen) - self.num_draft, len(seen) + 1)
        return [replace(self.sample, token_ids=seen[:end]) for end in ends]

    def accepted(self, sampled: Sequence[Sampled | KvRelayError]) -> list[Sampled] | KvRelayError:
        """Takes one result per request of `draws`; returns the samples that follow right drafts.

        Returns the error if the first sample failed. If a later sample failed, the tokens before it
        stand, as if the draft before it had been wrong.
        """
        if not sampled:
            return []
        drafts = self.token_ids[len(self.token_ids) - self.num_draft :]
        accepted: list[Sampled] = []
        for place, sample in enumerate(sampled):
            if isinstance(sample, KvRelayError):
                return accepted or sample
            accepted.append(sample)
            if place < self.num_draft and sample.token_id != drafts[place]:
                break
        return accepted

    def flaw(
        self, layout: KvLayout, max_model_len: int, vocab_size: int, num_blocks: int
    ) -> InvalidArgument | None:
        """Returns the error if tokens, positions or blocks are out of range; None if a model of
        these sizes can run the segment.
        """
        end = self.start + len(self.token_ids)
        stored = self.past + len(self.token_ids)
        needed = layout.blocks_for(stored)
        if not self.token_ids or not 0 <= self.dropped <= self.start or end > max_model_len:
            return InvalidArgument(
                f"a segment of tokens {self.start} to {end} is empty or outside of 0 to "
                f"{max_model_len}"
            )
        if not 0 <= min(self.token_ids) <= max(self.token_ids) < vocab_size:
            return InvalidArgument(
                f"a token id is outside of 0 to {vocab_size - 1}", field="token_ids"
            )
        if len(self.blocks) < needed:
            return InvalidArgument(
                f"{stored} tokens need {needed} blocks, and the block table has {len(self.blocks)}"
            )
        if not 0 <= min(self.blocks) <= max(self.blocks) < num_blocks:
            return InvalidArgument(f"a block number is outside of 0 to {num_blocks - 1}")
        assert self.sample is None or len(self.sample.token_ids) == end, (
            "a token is drawn after the last one of the sequence"
        )
        return None
