"""What two routers know of the caches of two workers, while the caches change and the network
between them is faulty. Real caches, feeds, messages and indexes, in virtual time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvrelay.clock import ManualClock
from kvrelay.engine.kvcache import change_journal
from kvrelay.engine.kvcache.block_pool import OutOfBlocks
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.types.block_keys import block_key
from kvrelay.wire.worker import decode_events, event_to_proto, pb
from kvrelay.worker import cache_feed
from kvrelay.worker.cache_feed import CacheFeeds
from kvrelay.worker.session import RouterSession
from kvrelay.worker_messages import Event
from router.core.prefixes.prefix_index import PrefixIndex
from router.core.prefixes.prompt_blocks import PromptBlocks

SIZE = 2
WORKERS = ("p0", "d0")
ROUTERS = (0, 1)
LATENCY_S = 0.02
WITHIN_S = 1.0
# If the router's wish for a snapshot is lost as well: it is repeated with the next sign of life.
WISH_LOST_S = 2.5
# A fault meets a message that is sent this soon after the operation, or none. The updates of the
# operation are. A fault that met the repair of an earlier one would need more time.
FAULT_S = 0.3
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
FAULTS = st.sampled_from(
    ["", "", "", "lose", "lose", "twice", "late", "swap", "lose wish", "garble"]
)


class Link(RouterSession):
    """A session whose events go through a network that the test rules."""

    def __init__(self, carry: Callable[[bytes], None]) -> None:
        super().__init__("router")
        self.carry = carry
        self.waiting: list[bytes] = []
        self.stalled = False

    @property
    def pending(self) -> int:
        return len(self.waiting)

    def send(self, event: Event) -> None:
        self.waiting.append(event_to_proto(event).SerializeToString())
        self.flush()

    def flush(self) -> None:
        while self.waiting and not self.stalled:
            self.carry(self.waiting.pop(0))


class KnownCaches(RuleBasedStateMachine):
    """After each operation and at most one fault, both routers know each cache within a second."""

    @initialize(
        num_blocks=st.integers(3, 14),
        part_blocks=st.sampled_from([1, 3, 8192]),
        most_changes=st.sampled_from([2, 6, 2**16]),
    )
    def start(self, num_blocks: int, part_blocks: int, most_changes: int) -> None:
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(change_journal, "MOST_CHANGES", most_changes)
        self.patched.setattr(cache_feed, "MOST_PENDING", 3)
        self.clock = ManualClock()
        self.numbers = count()
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.num_blocks, self.part_blocks = num_blocks, part_blocks
        self.indexes = [PrefixIndex() for _ in ROUTERS]
        self.caches: dict[str, KvCache] = {}
        self.feeds: dict[str, CacheFeeds] = {}
        self.links: dict[tuple[str, int], Link] = {}
        self.running: dict[str, list[list[int]]] = {}
        self.fault, self.fault_until = "", 0.0
        self.held_back: list[Callable[[], None]] = []
        for worker_id in WORKERS:
            self.begin(worker_id)
        self.settle()

    def teardown(self) -> None:
        if hasattr(self, "patched"):
            self.patched.undo()

    def begin(self, worker_id: str) -> None:
        """A new incarnation of the worker, which both routers connect to."""
        self.caches[worker_id] = KvCache(self.num_blocks, SIZE, model="layout")
        pool = self.caches[worker_id].pool
        self.feeds[worker_id] = CacheFeeds(pool, self.clock, self.part_blocks)
        self.running[worker_id] = []
        for router in ROUTERS:
            self.connect(worker_id, router)
        self.at(0.0, self.tick, worker_id, self.feeds[worker_id])

    def connect(self, worker_id: str, router: int) -> None:
        feeds, old = self.feeds[worker_id], self.links.get((worker_id, router))
        if old is not None:
            feeds.close(old)

        def carry(data: bytes) -> None:
            if self.links.get((worker_id, router)) is link:
                self.transmit(worker_id, router, link, data)

        link = Link(carry)
        self.links[worker_id, router] = link
        self.indexes[router].open(worker_id, exact=True)
        feeds.open(link)

    # The network

    def at(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        entry = (self.clock.now() + delay, next(self.numbers), lambda: call(*args))
        heapq.heappush(self.due, entry)

    def tick(self, worker_id: str, feeds: CacheFeeds) -> None:
        if self.feeds[worker_id] is feeds:
            self.at(feeds.step(), self.tick, worker_id, feeds)

    def transmit(self, worker_id: str, router: int, link: Link, data: bytes) -> None:
        def arrive(data: bytes = data) -> None:
            if self.links[worker_id, router] is link:
                self.arrived(worker_id, router, link, data)

        if self.fault != "wish" and self.clock.now() > self.fault_until:
            self.fault = ""
        fault = self.fault
        if fault != "lose wish":
            self.fault = ""
        match fault:
            case "lose" | "lose wish":
                self.fault = "wish" if fault == "lose wish" else ""
                return
            case "twice":
                self.at(LATENCY_S, arrive)
                self.at(0.3, arrive)
            case "late":
                self.at(0.4, arrive)
            case "swap":
                self.held_back.append(arrive)
                return
            case "garble":
                message = pb.SessionResponse.FromString(data)
                message.cache.stored += b"\1" * 7
                self.at(LATENCY_S, arrive, message.SerializeToString())
            case "wish":
                self.fault = "wish"
                self.at(LATENCY_S, arrive)
            case _:
                self.at(LATENCY_S, arrive)
        for held in self.held_back:
            self.at(LATENCY_S, held)
        self.held_back.clear()

    def arrived(self, worker_id: str, router: int, link: Link, data: bytes) -> None:
        index, now = self.indexes[router], self.clock.now()
        for event in decode_events(pb.SessionResponse.FromString(data)).events:
            if index.apply(worker_id, event, now):
                if self.fault == "wish":
                    self.fault = ""
                else:
                    self.at(LATENCY_S, self.feeds[worker_id].resync, link)

    def settle(self, seconds: float = WITHIN_S) -> None:
        """Some time passes; then all routers know all caches."""
        end = self.clock.now() + seconds
        while self.due and self.due[0][0] <= end:
            when, _, call = heapq.heappop(self.due)
            self.clock.advance(max(0.0, when - self.clock.now()))
            call()
        self.clock.advance(end - self.clock.now())
        for worker_id, cache in self.caches.items():
            cache.check_integrity()
            held = {block_key(hash) for hash in cache.pool.named_hashes}
            for router, index in enumerate(self.indexes):
                replica = index.replica(worker_id)
                assert replica is not None
                assert replica.keys == held, (worker_id, router)

    def after(self, fault: str) -> None:
        """The operation's messages meet the fault."""
        self.fault, self.fault_until = fault, self.clock.now() + FAULT_S
        self.settle(WISH_LOST_S if fault in ("lose wish", "wish") else WITHIN_S)
        self.fault = ""

    # Operations

    def admit(self, worker_id: str, prompt: list[int], salt: str) -> bool:
        """Allocates, hashes and perhaps evicts. Returns whether there was room."""
        cache = self.caches[worker_id]
        hasher = cache.hasher(salt)
        hasher.extend(prompt)
        blocks = cache.match(hasher, len(prompt) - 1)
        known = len(blocks)
        try:
            blocks += cache.allocate(-(-len(prompt) // SIZE) - known)
        except OutOfBlocks:
            cache.release(blocks)
            return False
        cache.publish(hasher, blocks, known, len(hasher.hashes), salt)
        self.running[worker_id].append(blocks)
        return True

    @rule(
        worker_id=st.sampled_from(WORKERS),
        prompt=PROMPTS,
        salt=st.sampled_from(["", "other"]),
        fault=FAULTS,
    )
    def compute(self, worker_id: str, prompt: list[int], salt: str, fault: str) -> None:
        self.admit(worker_id, prompt, salt)
        self.after(fault)
        self.check_prediction(worker_id, prompt, salt)

    @rule(prompt=PROMPTS, fault=FAULTS)
    def hand_off(self, prompt: list[int], fault: str) -> None:
        if self.admit("p0", prompt, "") and self.admit("d0", prompt, ""):
            self.caches["p0"].release(self.running["p0"].pop())
        self.after(fault)

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data(), doubt=st.booleans(), fault=FAULTS)
    def abort(self, data: st.DataObject, doubt: bool, fault: str) -> None:
        """A sequence ends. With `doubt`, its blocks are made unfindable before."""
        worker_id = data.draw(st.sampled_from([one for one in WORKERS if self.running[one]]))
        index = data.draw(st.integers(0, len(self.running[worker_id]) - 1))
        blocks = self.running[worker_id].pop(index)
        if doubt:
            self.caches[worker_id].withdraw(blocks)
        self.caches[worker_id].release(blocks)
        self.after(fault)

    @rule(worker_id=st.sampled_from(WORKERS), fault=FAULTS)
    def clear(self, worker_id: str, fault: str) -> None:
        """A prompt that takes all blocks evicts whatever no sequence holds."""
        cache = self.caches[worker_id]
        cache.release(cache.allocate(cache.pool.units_available))
        self.after(fault)

    @rule(worker_id=st.sampled_from(WORKERS), fault=FAULTS)
    def restart(self, worker_id: str, fault: str) -> None:
        self.fault, self.fault_until = fault, self.clock.now()
        self.begin(worker_id)
        # The first message may have met the fault already, and only the wish is still to be lost.
        self.after(self.fault)

    @rule(worker_id=st.sampled_from(WORKERS), router=st.sampled_from(ROUTERS))
    def reconnect(self, worker_id: str, router: int) -> None:
        self.connect(worker_id, router)
        self.settle()

    @rule(worker_id=st.sampled_from(WORKERS), router=st.sampled_from(ROUTERS), prompt=PROMPTS)
    def slow_reader(self, worker_id: str, router: int, prompt: list[int]) -> None:
        """A router reads nothing for a while. The worker does not queue without bound for it."""
        link = self.links[worker_id, router]
        link.stalled = True
        for number in range(3):
            self.admit(worker_id, [*prompt, number % 2], "")
            for _ in range(30):
                when, _, call = heapq.heappop(self.due)
                self.clock.advance(max(0.0, when - self.clock.now()))
                call()
            assert link.pending <= 3 + 1 + 2 * self.num_blocks
        link.stalled = False
        link.flush()
        self.settle()

    def check_prediction(self, worker_id: str, prompt: list[int], salt: str) -> None:
        """The router predicts what a sequence that came now would find.

        If the block before a cached one was evicted and computed again, the cache has the block and
        its hash, but another content before it, and does not find it.
        """
        cache = self.caches[worker_id]
        hasher = cache.hasher(salt)
        hasher.extend(prompt)
        unlike = cache.pool.collisions
        found = cache.match(hasher, len(prompt) - 1)
        unlike = cache.pool.collisions - unlike
        cache.release(found)
        blocks = PromptBlocks(cache.hasher(salt))
        blocks.extend(prompt)
        for index in self.indexes:
            predicted = index.predict(worker_id, blocks, len(prompt), [])
            if unlike:
                assert predicted > (len(found) * SIZE, 0)
            else:
                assert predicted == (len(found) * SIZE, 0)


TestKnownCaches = KnownCaches.TestCase
TestKnownCaches.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


@pytest.mark.long
@pytest.mark.timeout(1200)
class TestLongHistories(KnownCaches.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=20, stateful_step_count=1000, deadline=None)
