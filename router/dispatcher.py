"""All requests of one router and the workers that it knows: pure, like the lifecycles that it drives."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from kvrelay.config import ClusterConfig
from kvrelay.engine.hashing import BlockHasher
from kvrelay.errors import FailedPrecondition, KvRelayError, ResourceExhausted
from kvrelay.messages import Event, Failed, HandedOff, Refused, Renew, Reserved, TokenBatch
from kvrelay.types import WorkerInfo
from router.effects import Effect, Send
from router.lifecycle import RETRY_AFTER_S, Lifecycle, Settings
from router.policy import Assignment, Wait, WorkerView, assign
from router.prefix_index import PrefixIndex
from router.request import Request

FULL_FOR_S = 0.1  # a worker that refused is asked again after that, or when it got rid of a sequence
INDEX_BLOCKS = 65_536  # remembered of a worker that does not say how many it has


@dataclass(slots=True)
class _Worker:
    info: WorkerInfo
    full_until: float = 0.0
    last_assigned: int = 0


@dataclass(slots=True)
class _Entry:
    life: Lifecycle
    order: tuple[int, int, str]  # priority, then first come first served; request id
    salt: str
    hashers: dict[int, BlockHasher] = field(default_factory=dict)  # by block size, which pools may have unlike

    def hashes(self, block_size: int) -> list[int]:
        if block_size not in self.hashers:
            self.hashers[block_size] = BlockHasher(block_size, self.salt)
        return self.hashers[block_size].extend(self.life.sequence)


class Dispatcher:
    """Holds every request from `submit` to its End, in a bounded queue until workers have room.

    What each worker has to do for this router is derived from the lifecycles, so it cannot drift from them.
    Each method takes the time and returns effects, to be carried out in order.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._settings = Settings(config.router.max_attempts, config.transfer.lease_s, config.transfer.transport)
        self._entries: dict[str, _Entry] = {}
        self._queued: set[str] = set()
        self._queue: list[tuple[int, int, str]] = []  # heap of their orders, and of some that are not queued any more
        self._running: dict[str, _Entry] = {}  # those with workers
        self._workers: dict[str, _Worker] = {}
        self._index = PrefixIndex()
        self._numbers = count(1)
        self._left = False  # whether a request has left its workers since the queue was last looked at
        self._renew_at = 0.0
        self._wait = Wait("no decode worker is ready", no_worker=True)

    # What can be seen from outside

    @property
    def unfinished(self) -> int:
        return len(self._entries)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queued)

    @property
    def waiting_tokens(self) -> int:
        return sum(self._entries[one].life.num_tokens for one in self._queued)

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return tuple(one.info for one in self._workers.values())

    # Requests

    def submit(self, request: Request, now: float) -> tuple[Lifecycle, list[Effect]]:
        """Raises FailedPrecondition for a request id that is live, and what check_room raises."""
        if request.request_id in self._entries:
            raise FailedPrecondition(
                f"request_id {request.request_id!r} is in use by a request that has not ended; choose another",
                field="request_id",
            )
        self.check_room()
        life = Lifecycle(request, self._settings)
        life.timeline.mark("tokenize", now)
        order = (request.priority, next(self._numbers), request.request_id)
        entry = _Entry(life, order, request.salt)
        self._entries[request.request_id] = entry
        if request.complete is not None:
            return life, self._settle(entry, life.complete(request.complete, now))
        return life, self._settle(entry, []) + self._pump(now)

    def check_room(self) -> None:
        """Raises ResourceExhausted when the queue is full."""
        if self.waiting >= self._config.router.max_queue:
            raise ResourceExhausted(f"{self.waiting} requests are waiting already", retry_after_s=RETRY_AFTER_S)

    def cancel(self, request_id: str, error: KvRelayError, now: float) -> list[Effect]:
        entry = self._entries.get(request_id)
        return [] if entry is None else self._settle(entry, entry.life.cancel(error)) + self._pump(now)

    def stop(self, request_id: str, now: float) -> list[Effect]:
        entry = self._entries.get(request_id)
        return [] if entry is None else self._settle(entry, entry.life.complete("stop", now)) + self._pump(now)

    # Workers

    def worker_found(self, info: WorkerInfo, now: float) -> list[Effect]:
        """A worker can be reached. One with a known id has taken the place of its former self."""
        effects = self.worker_lost(info.worker_id, now) if info.worker_id in self._workers else []
        self._workers[info.worker_id] = _Worker(info)
        return effects + self._pump(now)

    def worker_lost(self, worker_id: str, now: float) -> list[Effect]:
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return []
        self._index.drop(worker_id)
        draining = worker.info.state == "draining"
        effects: list[Effect] = []
        for entry in list(self._running.values()):
            effects += self._settle(entry, entry.life.worker_lost(worker_id, draining, now))
        return effects + self._pump(now)

    def workers_changed(self, infos: Iterable[WorkerInfo], now: float) -> list[Effect]:
        """News of workers that were found: their state and load."""
        for info in infos:
            worker = self._workers.get(info.worker_id)
            if worker is not None and worker.info.epoch == info.epoch:
                worker.info = info
        return self._pump(now)

    def on_event(self, worker_id: str, event: Event, now: float) -> list[Effect]:
        if isinstance(event, TokenBatch):
            effects: list[Effect] = []
            for sequence in event.sequences:
                entry = self._entries.get(sequence.request_id)
                if entry is not None:
                    effects += self._settle(entry, entry.life.on_event(worker_id, sequence, now))
        else:
            effects = self._on_event(worker_id, event, now)
        return effects + self._pump(now) if self._left and self._queue else effects

    def tick(self, now: float) -> list[Effect]:
        """To be called a few times in the least of lease, deadline and retry delays."""
        effects: list[Effect] = []
        for entry in list(self._entries.values()):
            life = entry.life
            if now >= life.request.deadline:
                step = life.expire(self._wait.why if self._wait.no_worker else "")
            else:
                step = life.tick(now)
            effects += self._settle(entry, step)
        if now >= self._renew_at:
            self._renew_at = now + self._settings.lease_seconds / 4
            effects += self._renewals()
        return effects + self._pump(now)

    # Inside

    def _on_event(self, worker_id: str, event: Reserved | Refused | HandedOff | Failed, now: float) -> list[Effect]:
        entry = self._entries.get(event.request_id)
        if entry is None:
            return []
        effects = entry.life.on_event(worker_id, event, now)
        return self._settle(
            entry, effects, full_until=(worker_id, now + FULL_FOR_S) if isinstance(event, Refused) else None
        )

    def _settle(
        self, entry: _Entry, effects: list[Effect], full_until: tuple[str, float] | None = None
    ) -> list[Effect]:
        """Brings the books up to date after a step of the entry's lifecycle; hands its effects on."""
        life = entry.life
        request_id = life.request.request_id
        if request_id in self._running and not life.holders:
            del self._running[request_id]
            self._make_room(life.last_assignment, full_until)
        if life.state == "queued" and request_id not in self._queued:
            self._queued.add(request_id)
            heapq.heappush(self._queue, entry.order)
        elif life.ended:
            if life.state == "finished" and life.last_assignment is not None:
                self._remember(life.last_assignment.decode, entry)  # for the conversation's next turn
            self._queued.discard(request_id)
            self._entries.pop(request_id, None)
        return effects

    def _make_room(self, left: Assignment | None, full_until: tuple[str, float] | None) -> None:
        """Workers that a request left may have room again, unless one of them just said that it has none."""
        assert left is not None, "a request ran without an assignment"
        self._left = True
        for worker_id in (left.prefill, left.decode):
            if worker_id in self._workers:
                self._workers[worker_id].full_until = 0.0
        if full_until is not None and full_until[0] in self._workers:
            self._workers[full_until[0]].full_until = full_until[1]

    def _pump(self, now: float) -> list[Effect]:
        """Places waiting requests, best first, until one finds no room; those behind it do not overtake it."""
        effects: list[Effect] = []
        self._left = False
        self._wait = Wait("it may have killed a worker, so it waits for its turn alone")
        put_back: list[tuple[int, int, str]] = []
        if len(self._queue) > 2 * len(self._queued) + 64:  # most of them left while they waited
            self._queue = [self._entries[one].order for one in self._queued]
            heapq.heapify(self._queue)
        while self._queue:
            request_id = self._queue[0][2]
            if request_id not in self._queued or self._entries[request_id].order != self._queue[0]:
                heapq.heappop(self._queue)
                continue
            entry = self._entries[request_id]
            if self._must_pause(entry.life, now):
                put_back.append(heapq.heappop(self._queue))
                continue
            decision = assign(self._views(entry, now), entry.life.num_tokens, entry.life.avoid, self._config.router)
            if isinstance(decision, Wait):
                self._wait = decision
                break
            heapq.heappop(self._queue)
            effects += self._place(entry, decision, now)
        for item in put_back:
            heapq.heappush(self._queue, item)
        return effects

    def _must_pause(self, life: Lifecycle, now: float) -> bool:
        """A request that may have killed its worker runs beside no other such: if one dies again, it was this one."""
        if life.suspicion == 0:
            return False
        others = (one.life for one in self._running.values())
        return now < life.not_before or any(one.suspicion and not one.proven for one in others)

    def _place(self, entry: _Entry, assignment: Assignment, now: float) -> list[Effect]:
        request_id = entry.life.request.request_id
        self._queued.discard(request_id)
        self._running[request_id] = entry
        for worker_id in (assignment.prefill, assignment.decode):
            if worker_id:
                self._remember(worker_id, entry)
                self._workers[worker_id].last_assigned = next(self._numbers)
        return self._settle(entry, entry.life.assign(assignment, now))

    def _remember(self, worker_id: str, entry: _Entry) -> None:
        """The worker's cache will hold this sequence, or does."""
        worker = self._workers.get(worker_id)
        if worker is not None and self._config.kv.prefix_cache:
            self._index.add(
                worker_id, entry.hashes(worker.info.block_size), worker.info.load.blocks_total or INDEX_BLOCKS
            )

    def _views(self, entry: _Entry, now: float) -> list[WorkerView]:
        queued: Counter[str] = Counter()
        held: Counter[str] = Counter()
        sequences: Counter[str] = Counter()
        for one in self._running.values():
            placed = one.life.assignment
            assert placed is not None, "a request without workers is not running"
            held[placed.decode] += one.life.num_tokens
            sequences[placed.decode] += 1
            if one.life.state in ("reserving", "prefilling"):
                queued[placed.prefill] += placed.uncached_tokens
        needed = entry.life.num_tokens
        seats = self._config.decode.max_batch
        views = []
        for worker_id, worker in self._workers.items():
            info = worker.info
            if info.state != "ready":
                continue
            room = info.load.blocks_total * info.block_size
            over = sequences[worker_id] >= seats or bool(room and held[worker_id] and held[worker_id] + needed > room)
            # The last token is computed whatever the cache holds: its logits are wanted.
            hashes = entry.hashes(info.block_size) if self._config.kv.prefix_cache else []
            cached = min(self._index.match(worker_id, hashes) * info.block_size, needed - 1)
            views.append(
                WorkerView(
                    worker_id,
                    info.pool,
                    full=over or now < worker.full_until,
                    queued_tokens=queued[worker_id],
                    held_tokens=held[worker_id],
                    cached_tokens=cached,
                    last_assigned=worker.last_assigned,
                    address=info.address,
                    block_size=info.block_size,
                )
            )
        return views

    def _renewals(self) -> list[Effect]:
        leases: dict[str, list[int]] = {}
        for entry in self._running.values():
            life = entry.life
            if life.lease_id is not None and life.assignment is not None:
                leases.setdefault(life.assignment.decode, []).append(life.lease_id)
        return [Send(worker, Renew(tuple(ids), self._settings.lease_seconds)) for worker, ids in leases.items()]
