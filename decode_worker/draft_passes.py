"""The forward passes of a draft model. Run in the engine's thread."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What the draft model computes for one sequence in one step."""

    # The next tokens of the sequence that have no KV in `blocks`.
    token_ids: array[int]
    # Tokens before them.
    start: int
    # The block table, at least up to the last draft token but one.
    blocks: tuple[int, ...]
    # Tokens to draft after them. 0 if tokens of the sequence are left for later steps.
    depth: int


def run_draft_passes(
    runner: ModelRunner, requests: Sequence[DraftRequest]
) -> list[tuple[int, ...]]:
    """Returns the draft of each request, of `depth` tokens: those with the largest logits.

    The first pass computes the tokens of all requests, and each further pass one draft token of
    each request that is deep enough. The KV of all but the last draft token is stored. Raises what
    `ModelRunner.forward` raises.
    """
    drafts: list[list[int]] = [[] for _ in requests]
    segments = [Segment(one.token_ids, one.start, one.blocks) for one in requests]
    rows, row = [], -1
    for one in requests:
        row += len(one.token_ids)
        if one.depth:
            rows.append(row)
    logits = runner.forward(segments, rows)
    running = [place for place, one in enumerate(requests) if one.depth]
    while running:
        for place, token in zip(running, logits.argmax(dim=-1).tolist(), strict=True):
            drafts[place].append(token)
        running = [place for place in running if len(drafts[place]) < requests[place].depth]
        if running:
            segments = [_next(requests[place], drafts[place]) for place in running]
            logits = runner.forward(segments, range(len(segments)))
    return [tuple(draft) for draft in drafts]


def _next(request: DraftRequest, draft: Sequence[int]) -> Segment:
    """The latest draft token of a request."""
    start = request.start + len(request.token_ids) + len(draft) - 1
    return Segment(array("q", draft[-1:]), start, request.blocks)
