"""A simulated prefill worker: the production scheduler over steps of the profile's time."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.errors import Code
from kvrelay.planning.profile import Profile
from kvrelay.simulation.agenda import VirtualClock
from kvrelay.simulation.decode import SimulatedDecode
from kvrelay.simulation.worker import Cluster, Key, SimulatedWorker, token_of
from kvrelay.types.requests import Handoff
from kvrelay.types.workers import PoolName, WorkerLoad
from kvrelay.worker.sequence import Sequence, Work
from kvrelay.worker.steps.busy_share import BusyTime
from kvrelay.worker.steps.meter import Meter
from kvrelay.worker_messages import (
    DRAINING,
    Abort,
    Command,
    Failed,
    HandedOff,
    HandoffTarget,
    Prefill,
    PrefixSource,
    SequenceTokens,
    TokenBatch,
)
from prefill_worker.fetch_cost_model import FetchCostModel
from prefill_worker.scheduler import PrefillScheduler


@dataclass(slots=True, eq=False)
class _Relay:
    """One prompt. `held` are the blocks that the hand-off reads."""

    sequence: Sequence
    target: HandoffTarget
    # Blocks that were sent, or that the target has cached.
    pushed: int
    began_s: float | None = None
    scheduled: bool = False
    held: list[int] = field(default_factory=list)


class SimulatedPrefill(SimulatedWorker):
    """Computes prompts in chunks. The blocks of a chunk travel while the next chunk computes, one
    after the other over the worker's link.
    """

    pool: PoolName = "prefill"

    def __init__(
        self, worker_id: str, epoch: int, profile: Profile, num_blocks: int, cluster: Cluster
    ) -> None:
        super().__init__(worker_id, epoch, profile, num_blocks, cluster)
        self.scheduler = PrefillScheduler(self.cache, cluster.config.prefill.chunk_tokens)
        self._relays: dict[Key, _Relay] = {}
        self._stepping = False
        # The link is busy until then.
        self._link_free_s = 0.0
        self._busy = BusyTime(self.now)
        self._meter = Meter(VirtualClock(cluster.agenda))
        self._fetch_cost = FetchCostModel()

    @property
    def empty(self) -> bool:
        """Whether no prompt is here."""
        return not self._relays

    def handle(self, command: Command) -> None:
        """Runs a command of the router."""
        match command:
            case Prefill(spec, target, source):
                if self.draining:
                    self.tell(Failed(*spec.key, Code.UNAVAILABLE, DRAINING))
                    return
                sequence = self.sequence(spec)
                relay = _Relay(sequence, target, target.cached_tokens // self.cache.block_size)
                self._relays[spec.key] = relay
                if source is None or not self._fetch(relay, source):
                    self._schedule(relay)
            case Abort(request_id, attempt):
                self._abort((request_id, attempt))

    def load(self) -> WorkerLoad:
        """The load that the worker reports."""
        waiting = [one for one in self.scheduler if one.started is None]
        pool = self.cache.pool
        return WorkerLoad(
            running=len(self._relays) - len(waiting),
            waiting=len(waiting),
            waiting_tokens=sum(one.uncomputed for one in waiting),
            blocks_total=pool.num_blocks,
            blocks_held=pool.num_held,
            blocks_cached=pool.num_cached,
            tokens_per_second=self._meter.tokens_per_second(),
            queue_wait_p95_ms=self._meter.queue_wait_p95_ms(),
            busy_share=self._busy.share(self.now),
            prompt_tokens_per_second=self.scheduler.prompt_rate.per_second(self.now),
        )

    def fail_all(self) -> None:
        """Hands all prompts back."""
        for key in list(self._relays):
            self._abort(key)
            self.tell(Failed(*key, Code.UNAVAILABLE, DRAINING))

    def _schedule(self, relay: _Relay) -> None:
        relay.scheduled = True
        self.scheduler.add(relay.sequence)
        self._step()

    def _fetch(self, relay: _Relay, source: PrefixSource) -> bool:
        """Fetches a prefix from another worker, if that is predicted to be faster than computing
        it. Returns whether the prompt starts later for that reason.
        """
        sequence, cache = relay.sequence, self.cache
        peer = self.cluster.peer(source.worker_id)
        if peer is None or peer.cache.block_size != cache.block_size:
            return False
        sequence.take_prefix(cache)
        end = min(source.cached_tokens, len(sequence.tokens) - 1)
        end -= end % cache.block_size
        lent = peer.cache.match(sequence.hasher, end)
        peer.cache.release(lent)
        missing = min(end, len(lent) * cache.block_size) - sequence.num_computed
        num_bytes = max(0, missing) // cache.block_size * self.block_bytes
        pays = missing > 0 and self._fetch_cost.is_fetch_faster(missing, num_bytes)
        try:
            if pays:
                sequence.take_blocks(cache, len(sequence.tokens))
        except OutOfBlocks:
            pays = False
        if not pays:
            sequence.drop_blocks(cache)
            return False
        seconds = 2 * self.cluster.delays.message_s + self.costs.handoff_s(num_bytes)

        def arrived() -> None:
            self._fetch_cost.add_fetch(num_bytes, seconds)
            if relay.sequence.ended:
                return
            sequence.fetched_tokens = missing
            sequence.advance(cache, missing)
            sequence.cached_tokens = sequence.num_computed
            sequence.started, sequence.fetch_seconds = self.now, seconds
            self._schedule(relay)

        self.after(seconds, arrived)
        return True

    # Steps

    def _step(self) -> None:
        if self._stepping:
            return
        batch = self.scheduler.next(self.now)
        if not batch:
            self.process.ends()
            return
        self._stepping = True
        self._busy.began(self.now)
        self.run_step(batch, lambda seconds: self._stepped(batch, seconds))

    def _stepped(self, batch: list[Work], seconds: float) -> None:
        self._stepping = False
        self.busy_s += seconds
        self._busy.ended(self.now)
        self._meter.count(sum(work.num_tokens for work in batch))
        self.scheduler.ran(batch, seconds, self.now)
        self.scheduler.complete(batch)
        said: list[SequenceTokens] = []
        computed: list[tuple[_Relay, SequenceTokens | None]] = []
        for work in batch:
            sequence = work.sequence
            if sequence.ended:
                continue
            tokens = self._first_token(sequence) if work.sample else None
            if tokens is not None:
                said.append(tokens)
            computed.append((self._relays[sequence.spec.key], tokens))
        if said:
            self.tell(TokenBatch(tuple(said)))
        for relay, tokens in computed:
            self._push(relay, tokens)
        self._step()

    def _first_token(self, sequence: Sequence) -> SequenceTokens:
        token, index = token_of(sequence.spec), sequence.num_emitted
        finish = sequence.append(token, frozenset(), self.profile.max_model_len)
        timings = sequence.timings(self.now)
        self._meter.waited(timings.queue_seconds)
        uncached = len(sequence.spec.token_ids) - timings.cached_tokens
        self._fetch_cost.add_compute(uncached, timings.compute_seconds)
        return SequenceTokens(*sequence.spec.key, index, (token,), (), finish, timings)

    # Hand-off

    def _push(self, relay: _Relay, tokens: SequenceTokens | None) -> None:
        """Sends the blocks that the step has filled. After the last chunk, commits."""
        sequence = relay.sequence
        if tokens is not None and tokens.finish_reason is not None:
            # The answer is complete, so no decode worker needs its KV.
            self._abort(sequence.spec.key)
            return
        last = tokens is not None
        filled = sequence.num_computed // self.cache.block_size
        end = len(sequence.blocks) if last else filled
        seconds = max(0, end - relay.pushed) * self.block_bytes * self.costs.handoff_byte_s
        begin = max(self.now, self._link_free_s)
        relay.began_s = self.now if relay.began_s is None else relay.began_s
        self._link_free_s = begin + seconds
        relay.pushed = max(end, relay.pushed)
        if not last:
            return
        self.cache.pool.hold(sequence.blocks)
        relay.held = list(sequence.blocks)
        self.scheduler.remove(sequence)
        rest_s = self.costs.handoff_base_s + self.cluster.delays.handoff_s
        done, computed_at = self._link_free_s + rest_s, self.now
        self.after(done - self.now, lambda: self._commit(relay, computed_at))

    def _commit(self, relay: _Relay, computed_at: float) -> None:
        spec = relay.sequence.spec
        self.cache.release(relay.held)
        if self._relays.pop(spec.key, None) is None:
            # The attempt was aborted.
            self._step()
            return
        peer = self.cluster.peer(relay.target.worker_id)
        if isinstance(peer, SimulatedDecode) and peer.join(spec.key, relay.target.epoch):
            cached = relay.target.cached_tokens // self.cache.block_size
            blocks = -(-len(spec.token_ids) // self.cache.block_size) - cached
            begun = computed_at if relay.began_s is None else relay.began_s
            handoff = Handoff(
                transport="simulated",
                blocks=blocks,
                block_bytes=self.block_bytes,
                bytes=blocks * self.block_bytes,
                cached_blocks=cached,
                seconds=self.now - begun,
                exposed_seconds=self.now - computed_at,
                why="simulated link",
            )
            self.tell(HandedOff(*spec.key, handoff))
        else:
            text = f"hand-off to {relay.target.worker_id}: the worker is gone or the lease ended"
            self.tell(Failed(*spec.key, Code.UNAVAILABLE, text))
        self._step()

    def _abort(self, key: Key) -> None:
        relay = self._relays.pop(key, None)
        if relay is None or relay.sequence.ended:
            return
        if relay.scheduled:
            self.scheduler.remove(relay.sequence)
        else:
            relay.sequence.ended = True
            relay.sequence.drop_blocks(self.cache)
        self._step()
