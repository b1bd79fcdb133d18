"""Drafts of a smaller model, which runs in the same worker, with KV blocks of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial

from decode_worker.draft_passes import DraftRequest, run_draft_passes
from decode_worker.proposer import accepted_drafts
from kvrelay.engine.kvcache.block_pool import BlockPool, IntegrityError, OutOfBlocks
from kvrelay.process.telemetry import get_logger
from kvrelay.worker.context import WorkerContext
from kvrelay.worker.sequence import Sequence

# Tokens per step of the sequences whose KV the draft model has yet to compute, as after a hand-off.
CATCH_UP_TOKENS = 128

log = get_logger(__name__)

RunDraftPasses = Callable[[list[DraftRequest]], Awaitable[list[tuple[int, ...]]]]
"""Runs `run_draft_passes` in the engine's thread."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Sizes of the draft model and its memory."""

    num_blocks: int
    # Tokens.
    block_size: int
    # Tokens of the longest sequence.
    max_model_len: int
    # Most draft tokens of one sequence in one step.
    tokens: int


@dataclass(slots=True, eq=False)
class _DraftKv:
    """The draft model's KV of one sequence: of its first `length` tokens, then of `ahead`, draft
    tokens that may turn out wrong.
    """

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    ahead: tuple[int, ...] = ()
    # The draft for the tokens after `length`.
    draft: tuple[int, ...] = ()

    def rewind(self, sequence: Sequence) -> None:
        """Keeps the KV of the draft tokens that the sequence has. The rest is overwritten later."""
        kept = accepted_drafts(sequence.tokens, self.length, self.ahead)
        # The next pass needs a token.
        self.length = min(self.length + kept, len(sequence.tokens) - 1)
        self.ahead = self.draft = ()


class DraftModelProposer:
    """Drafts for all sequences of a step in one batch, greedily. Lives on the event loop; only the
    passes run in the engine's thread.

    If the draft model fails or has no blocks for a sequence, speculation stops for this sequence.
    """

    def __init__(self, limits: DraftLimits, run: RunDraftPasses) -> None:
        self._limits = limits
        self._run = run
        self._pool = BlockPool(limits.num_blocks)
        # The least recently used first.
        self._kv: dict[Sequence, _DraftKv] = {}
        # Sequences without speculation.
        self._stopped: set[Sequence] = set()

    @property
    def blocks_held(self) -> int:
        """Blocks of the draft model's KV that sequences hold."""
        return self._pool.num_held

    async def prepare(self, wanted: SequenceOf[tuple[Sequence, int]]) -> None:
        """Computes what the draft model has not seen of these sequences, and their drafts. Long
        prompts are computed in chunks over several steps, the shortest first.
        """
        sequences = {sequence for sequence, _ in wanted}
        asked: list[tuple[Sequence, _DraftKv]] = []
        requests: list[DraftRequest] = []
        budget = CATCH_UP_TOKENS
        for sequence, depth in sorted(wanted, key=lambda one: self._missing(one[0])):
            if sequence in self._stopped:
                continue
            kv = self._kv[sequence] = self._kv.pop(sequence, _DraftKv())
            kv.rewind(sequence)
            request = self._request(sequence, kv, depth, budget, sequences)
            if request is None:
                continue
            if len(request.token_ids) > self._limits.tokens + 1:
                budget -= len(request.token_ids)
            asked.append((sequence, kv))
            requests.append(request)
        if not requests:
            return
        try:
            drafts = await self._run(requests)
        except Exception as error:  # noqa: BLE001 - speculation may not end an answer
            log.warning(
                "draft_model_failed",
                requests=[sequence.spec.request_id for sequence, _ in asked],
                reason=f"{error!r:.300}",
            )
            for sequence, kv in asked:
                # A sequence that ended meanwhile has no KV any more.
                if self._kv.get(sequence) is kv:
                    self._stop(sequence)
            return
        for (sequence, kv), request, draft in zip(asked, requests, drafts, strict=True):
            if self._kv.get(sequence) is kv:
                kv.length = request.start + len(request.token_ids)
                kv.draft, kv.ahead = draft, draft[:-1]

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """The prepared draft; empty if the sequence has got other tokens since."""
        kv = self._kv.get(sequence)
        if kv is None or kv.length != len(sequence.tokens):
            return ()
        return kv.draft[:limit]

    def pause(self, sequence: Sequence) -> None:
        """Releases the KV of a sequence."""
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Releases the KV of a sequence. Passes that still write it end before the blocks are given
        to another sequence, since passes run one after another.
        """
        self._stopped.discard(sequence)
        self._release(sequence)

    def check_integrity(self, sequences: int) -> None:
        """Raises IntegrityError if blocks are held by no sequence, or by too many."""
        self._pool.check_integrity()
        held = sum(len(kv.blocks) for kv in self._kv.values())
        if held != self._pool.num_held or len(self._kv) > sequences:
            raise IntegrityError(
                f"{self._pool.num_held} blocks of the draft model are held, {held} of them by "
                f"{len(self._kv)} sequences, of {sequences} in the batch"
            )

    def _missing(self, sequence: Sequence) -> int:
        """Tokens that the draft model has not seen."""
        kv = self._kv.get(sequence)
        return len(sequence.tokens) - (0 if kv is None else kv.length)

    def _request(
        self,
        sequence: Sequence,
        kv: _DraftKv,
        depth: int,
        budget: int,
        wanted: set[Sequence],
    ) -> DraftRequest | None:
        """Takes the blocks for a step. Returns None if nothing is computed for the sequence."""
        missing = len(sequence.tokens) - kv.length
        if len(sequence.tokens) > self._limits.max_model_len:
            # The draft model has no positions for it.
            self._stop(sequence)
            return None
        # Sequences that keep up have at most a whole draft and the token after it.
        count = missing if missing <= self._limits.tokens + 1 else min(missing, budget)
        if not count:
            return None
        depth = min(depth, self._limits.max_model_len - len(sequence.tokens) + 1)
        depth = depth if count == missing else 0
        start = kv.length
        if not self._take_blocks(kv, start + count + max(0, depth - 1), wanted):
            self._stop(sequence)
            return None
        token_ids = sequence.tokens[start : start + count]
        return DraftRequest(token_ids, start, tuple(kv.blocks), depth)

    def _take_blocks(self, kv: _DraftKv, num_tokens: int, wanted: set[Sequence]) -> bool:
        """Makes the blocks cover `num_tokens` tokens. Takes them from sequences that are not in
        this step, the least recently used first. Returns False if that is not enough.
        """
        missing = -(-num_tokens // self._limits.block_size) - len(kv.blocks)
        if missing <= 0:
            return True
        for other in [one for one in self._kv if one not in wanted]:
            if missing <= self._pool.units_available:
                break
            self._release(other)
        try:
            kv.blocks += self._pool.allocate(missing, after=kv.blocks[-1] if kv.blocks else None)
        except OutOfBlocks:
            return False
        return True

    def _stop(self, sequence: Sequence) -> None:
        self._release(sequence)
        self._stopped.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        kv = self._kv.pop(sequence, None)
        if kv is not None:
            self._pool.release(kv.blocks)


def draft_proposer(context: WorkerContext) -> DraftModelProposer | None:
    """Returns the proposer of a worker's draft model, which runs in the engine's thread. Returns
    None if the worker has no draft model.
    """
    runner, wanted = context.draft, context.config.decode.draft
    if runner is None or wanted is None:
        return None
    limits = DraftLimits(
        runner.num_blocks, runner.layout.block_size, runner.max_model_len, wanted.tokens
    )

    async def run(requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        tokens = sum(len(one.token_ids) + max(0, one.depth - 1) for one in requests)
        step = partial(run_draft_passes, runner, requests)
        return await context.engine.timed(tokens, step, costed=False)

    return DraftModelProposer(limits, run)
