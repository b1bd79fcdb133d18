"""A decode worker: promises blocks, takes hand-offs in, and streams tokens from a continuous batch."""

from __future__ import annotations

from kv_transfer.lease import Lease, LeaseTable
from kvrelay.clock import Clock
from kvrelay.engine.blocks import OutOfBlocks
from kvrelay.engine.cache import KvCache
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
from kvrelay.types import SequenceSpec, WorkerLoad
from kvrelay.worker.base import Identity, Key, Worker
from kvrelay.worker.sequence import Sequence
from kvrelay.worker.session import Session
from decode_worker.scheduler import DecodeScheduler


class DecodeWorker(Worker):
    """Commands: Reserve, RunLocal, Renew, Abort. Events: Reserved or Refused, tokens, Failed."""

    def __init__(
        self,
        identity: Identity,
        runner: ModelRunner,
        cache: KvCache,
        leases: LeaseTable,
        *,
        max_batch: int,
        chunk_tokens: int,
        clock: Clock,
    ) -> None:
        self._scheduler = DecodeScheduler(cache, chunk_tokens)
        super().__init__(identity, runner, cache, self._scheduler, clock)
        self._leases = leases
        self._max_batch = max_batch
        self._reserved: dict[Key, tuple[Sequence, Reserved]] = {}  # waiting for their KV
        self._decoding: dict[Key, Sequence] = {}

    def handle(self, command: Command, session: Session) -> None:
        match command:
            case Reserve(spec, lease_seconds):
                if spec.key in self._reserved:
                    session.send(self._reserved[spec.key][1])
                elif spec.key not in self._decoding and self._takes(spec, session):
                    self._reserve(spec, lease_seconds, session)
            case RunLocal(spec):
                if spec.key not in self._decoding and self._takes(spec, session):
                    self._run_local(spec, session)
            case Renew(lease_ids, lease_seconds):
                self._leases.renew(lease_ids, lease_seconds, self.clock.now())
            case Abort(request_id, attempt):
                self.abort((request_id, attempt))
            case _:
                raise KvRelayError(f"a decode worker does not take {type(command).__name__}")
