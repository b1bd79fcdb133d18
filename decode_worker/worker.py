"""A decode worker: leases blocks, receives hand-offs, and streams tokens from a continuous
batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from decode_worker.drafter import Drafter
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.arena import device_of
from kv_transfer.lease import Lease, LeaseTable
from kv_transfer.prefix_export import PrefixExport
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kvrelay.clock import Clock
from kvrelay.config.schema import SpeculationConfig
from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.engine.kvcache.prefix_cache import KvCache
from kvrelay.engine.runner import ModelRunner
from kvrelay.errors import Code, KvRelayError
from kvrelay.messages import (
    Abort,
    Command,
    Failed,
    HandoffTarget,
    Refused,
    Renew,
    Reserve,
    Reserved,
    RunLocal,
    SequenceTokens,
)
from kvrelay.protocol import VERSION
from kvrelay.types import SequenceSpec, WorkerLoad
from kvrelay.worker.base import Identity, Key, Worker
from kvrelay.worker.busy import RecentMean
from kvrelay.worker.sequence import Sequence
from kvrelay.worker.session import RouterSession


class DecodeWorker(Worker):
    """Commands: Reserve, RunLocal, Renew, Abort. Events: Reserved or Refused, tokens, Failed."""

    def __init__(
        self,
        identity: Identity,
        runner: ModelRunner,
        cache: KvCache,
        sender: Sender,
        *,
        max_batch: int,
        chunk_tokens: int,
        speculation: SpeculationConfig | None,
        digests: bool,
        host: str,
        clock: Clock,
    ) -> None:
        drafter = None if speculation is None else Drafter(speculation, runner.max_model_len)
        self._scheduler = DecodeScheduler(cache, chunk_tokens, drafter)
        super().__init__(identity, runner, cache, self._scheduler, clock)
        self._leases = LeaseTable(identity.epoch)
        self.receiver = Receiver(
            runner.kv,
            self._leases,
            worker_id=identity.worker_id,
            model_id=runner.model_id,
            sampled_model_id=runner.sampled_model_id,
            layout_hash=runner.layout_hash,
            on_commit=self._join,
            clock=clock,
            digests=digests,
            host=host,
        )
        self._sender = sender
        self.lending = PrefixExport(cache, sender, identity.epoch)
        self._max_batch = max_batch
        self._slots_taken = RecentMean(clock.now())
        # Sequences that wait for their KV.
        self._reserved: dict[Key, tuple[Sequence, Reserved]] = {}
        self._decoding: dict[Key, Sequence] = {}

    @property
    def lending_key(self) -> bytes:
        """The grant key of this worker's prefix export."""
        return self.lending.key

    def take(self, command: Command, session: RouterSession) -> None:
        """Runs a router's command; see the class for the commands. A repeated Reserve gets the same
        answer.
        """
        match command:
            case Reserve(spec, lease_seconds, prefill_worker):
                if spec.key not in self.sessions:
                    if self._has_slot(spec, session):
                        self._reserve(spec, lease_seconds, prefill_worker, session)
                elif spec.key in self._reserved:
                    session.send(self._reserved[spec.key][1])
            case RunLocal(spec):
                if spec.key not in self.sessions and self._has_slot(spec, session):
                    self._run_local(spec, session)
            case Renew(lease_ids, lease_seconds):
                self._leases.renew(lease_ids, lease_seconds, self.clock.now())
            case Abort(request_id, attempt):
                self.abort((request_id, attempt))
            case _:
                raise KvRelayError(f"a decode worker does not accept {type(command).__name__}")

    def _join(self, lease: Lease, first_token: int, num_tokens: int) -> None:
        """Handles the commit of a reserved sequence: the sequence joins the batch with the token
        that the prefill worker sampled.
        """
        sequence, _ = self._reserved.pop(lease.key)
        expected = len(sequence.tokens)
        if num_tokens != expected or not 0 <= first_token < self.runner.vocab_size:
            sequence.drop_blocks(self.cache)
            text = (
                f"received KV of {num_tokens} tokens and first token {first_token} for a "
                f"sequence of {expected} tokens"
            )
            self.sessions.pop(lease.key).send(Failed(*lease.key, Code.DATA_LOSS, text))
            return
        sequence.advance(self.cache, num_tokens - sequence.num_computed)
        sequence.append(first_token, self.runner.eos_token_ids, self.runner.max_model_len)
        self._decoding[lease.key] = sequence
        self._scheduler.join(sequence)
        self.steps.wake()

    def advanced(self, sequence: Sequence, tokens: SequenceTokens | None) -> None:
        """Removes a sequence from the batch at its last token."""
        if tokens is not None and tokens.finish_reason is not None:
            self.abort(sequence.spec.key)

    def abort(self, key: Key) -> None:
        """Ends a sequence, and the push to its lease if it is reserved."""
        self.sessions.pop(key, None)
        if key in self._decoding:
            self._scheduler.remove(self._decoding.pop(key))
        elif key in self._reserved:
            lease_id = self._reserved[key][1].target.lease_id
            self._leases.close(lease_id)
            self.receiver.revoke(lease_id)
            self._release_leases()
        self.steps.wake()

    def _release_leases(self) -> None:
        """Frees the blocks of ended leases without a running copy."""
        for lease in self._leases.release():
            sequence, _ = self._reserved.pop(lease.key)
            sequence.drop_blocks(self.cache)
            self.steps.wake()

    def load(self) -> WorkerLoad:
        """The current counts, with leases and preemptions."""
        waiting, blocks = self._scheduler.waiting, self.cache.pool
        leased = sum(len(lease.writable) for lease in self._leases)
        return self.measured(
            running=len(self._scheduler) - len(waiting),
            waiting=waiting,
            leases=len(self._leases),
            blocks_leased=leased,
            busy_share=max(self._busy_share(), (blocks.num_held - leased) / blocks.num_blocks),
            preemptions=self._scheduler.preemptions,
        )

    def _busy_share(self) -> float:
        """The load of the batch slots. The time of the engine is no measure, since it computes
        whenever any sequence decodes.

        The square root of the mean share of taken slots, since steps of a larger batch take longer:
        requests that fill a quarter of the slots on each of two workers would take more than half
        of a single worker.
        """
        return math.sqrt(min(1.0, self._slots_taken.mean(self.clock.now())))

    def sequences(self) -> Iterator[Sequence]:
        """Decoding and reserved sequences."""
        yield from self._decoding.values()
        yield from (sequence for sequence, _ in self._reserved.values())

    def keep_house(self, now: float) -> None:
        """Ends sequences past their deadline and leases past their time."""
        super().keep_house(now)
        self._slots_taken.is_now(len(self._scheduler) / self._max_batch, now)
        for lease in self._leases.expire(now):
            self.receiver.revoke(lease.lease_id)
            session = self.sessions.pop(lease.key, None)
            if session is not None:
                session.send(
                    Failed(
                        *lease.key,
                        Code.FAILED_PRECONDITION,
                        "the lease ended before its KV arrived",
                    )
                )
        self._release_leases()

    async def close(self) -> None:
        """Ends all pushes and closes the connections, then releases the KV memory."""
        await self.receiver.close()
        await self._sender.close()
        await super().close()

    def _has_slot(self, spec: SequenceSpec, session: RouterSession) -> bool:
        """True if there is a batch slot for another sequence. Otherwise sends Refused."""
        if not self.can_run(spec, session):
            return False
        # An ended lease of the same key counts as a batch slot until the last copy into its blocks
        # is over.
        full = (
            len(self._scheduler) + len(self._leases) >= self._max_batch
            or spec.key in self._reserved
        )
        if full:
            session.send(Refused(*spec.key, "full"))
        return not full

    def _reserve(
        self, spec: SequenceSpec, lease_seconds: float, prefill_worker: str, session: RouterSession
    ) -> None:
        sequence = self.begin(spec)
        sequence.take_prefix(self.cache)
        cached_blocks = len(sequence.blocks)
        try:
            sequence.take_blocks(self.cache, len(sequence.tokens))
        except OutOfBlocks:
            sequence.drop_blocks(self.cache)
            session.send(Refused(*spec.key, "full"))
            return
        lease = self._leases.grant(
            spec.key, sequence.blocks, cached_blocks, lease_seconds, self.clock.now()
        )
        target = HandoffTarget(
            worker_id=self.identity.worker_id,
            address=self.identity.address,
            epoch=self.identity.epoch,
            lease_id=lease.lease_id,
            generation=lease.generation,
            num_blocks=len(lease.blocks),
            cached_tokens=sequence.num_computed,
            layout_hash=self.runner.layout_hash,
            host_id=self.identity.host_id,
            device=device_of(self.runner.kv),
            capability=self.receiver.capability(lease, prefill_worker),
            protocol=VERSION,
        )
        answer = Reserved(*spec.key, target)
        self.sessions[spec.key] = session
        self._reserved[spec.key] = sequence, answer
        session.send(answer)

    def _run_local(self, spec: SequenceSpec, session: RouterSession) -> None:
        sequence = self.begin(spec)
        self.sessions[spec.key] = session
        self._decoding[spec.key] = sequence
        self._scheduler.add(sequence)
        self.steps.wake()
