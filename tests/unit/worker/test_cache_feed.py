"""What a worker tells routers of its prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.worker_harness import Session, workers

from kvrelay.clock import ManualClock
from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.protocol_version import Protocol
from kvrelay.types.block_keys import block_key, unpack_keys
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.wire.worker import Hello, Welcome
from kvrelay.worker import cache_feed
from kvrelay.worker.cache_feed import BEAT_S, FLUSH_S, PART_PAUSE_S, CacheFeeds
from kvrelay.worker.session import RouterSession
from kvrelay.worker_messages import CacheUpdate, Event, ResyncCache, RunLocal, TokenBatch

SIZE = 8
CONFIG = ClusterConfig.model_validate(
    {
        "model": {"dtype": "float32"},
        "kv": {"block_size": SIZE, "memory": "4MiB"},
        "decode": {"max_batch": 4},
    }
)
PROMPT = tuple(range(2, 63))
SAMPLING = SamplingParams(temperature=0.0, max_tokens=4, seed=1, ignore_eos=True)
SPEC = SequenceSpec("a", 0, PROMPT, len(PROMPT), SAMPLING)


class Kept(RouterSession):
    """A session that keeps what is sent."""

    def __init__(self) -> None:
        super().__init__("router")
        self.sent: list[CacheUpdate] = []
        self.queued = 0

    @property
    def pending(self) -> int:
        return self.queued

    def send(self, event: Event) -> None:
        assert isinstance(event, CacheUpdate)
        self.sent.append(event)

    def take(self) -> list[CacheUpdate]:
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def published(cache: KvCache, *tokens: int) -> list[int]:
    hasher = cache.hasher("")
    hasher.extend(tokens)
    blocks = cache.allocate(len(hasher.hashes))
    cache.publish(hasher, blocks, 0, len(blocks))
    return blocks


def test_changes_are_coalesced_and_told_to_all(clock: ManualClock) -> None:
    cache, sessions = KvCache(8, 2), [Kept(), Kept()]
    feeds = CacheFeeds(cache.pool, clock)
    for session in sessions:
        feeds.open(session)
        (first,) = session.take()
        assert (first.number, first.begins, first.complete, first.blocks) == (1, True, True, 0)
    published(cache, 1, 2, 3, 4)
    published(cache, 5, 6)
    assert feeds.step() == FLUSH_S
    for session in sessions:
        (update,) = session.take()
        assert set(unpack_keys(update.stored)) == set(map(block_key, cache.pool.named_hashes))
        assert (update.number, update.begins, update.blocks) == (2, False, 3)
    feeds.step()
    assert not sessions[0].sent, "nothing has changed"
    clock.advance(BEAT_S)
    feeds.close(sessions[1])
    feeds.step()
    (beat,) = sessions[0].take()
    assert (beat.number, beat.stored, beat.removed, beat.blocks) == (3, b"", b"", 3)
    assert not sessions[1].sent


def test_a_router_that_does_not_read_gets_a_snapshot_later(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_feed, "MOST_PENDING", 4)
    cache, session = KvCache(8, 2), Kept()
    feeds = CacheFeeds(cache.pool, clock)
    feeds.open(session)
    session.take()
    session.queued = 5
    blocks = published(cache, 1, 2, 3, 4)
    for _ in range(20):
        clock.advance(BEAT_S)
        feeds.step()
        assert not session.sent
    session.queued = 0
    cache.withdraw(blocks[1:])
    feeds.step()
    (snapshot,) = session.take()
    assert (snapshot.begins, snapshot.complete, snapshot.blocks) == (True, True, 1)


def test_a_large_snapshot_comes_in_parts_with_pauses(clock: ManualClock) -> None:
    cache, session = KvCache(10, 2), Kept()
    published(cache, *range(20))
    feeds = CacheFeeds(cache.pool, clock, 4)
    feeds.open(session)
    assert feeds.step() == PART_PAUSE_S
    assert feeds.step() == FLUSH_S
    updates = session.take()
    # What has been published before the first part is told again.
    parts = [one for one in updates if not one.removed]
    assert [one.begins for one in parts].count(True) == 1
    assert all(len(one.stored) <= 4 * 8 for one in parts)
    assert [one.complete for one in parts] == [False] * (len(parts) - 1) + [True]


async def test_a_real_worker_tells_before_the_answer_ends(tiny_model: Callable[..., Path]) -> None:
    async with workers(tiny_model("llama"), CONFIG, "decode-0") as running:
        decode = await running.session("decode-0")
        first = await decode.any_event()
        assert isinstance(first, CacheUpdate)
        assert (first.number, first.begins, first.complete) == (1, True, True)
        await decode.send(RunLocal(SPEC))
        known: set[int] = set()
        while True:
            event = await decode.any_event()
            if isinstance(event, CacheUpdate):
                known |= set(unpack_keys(event.stored))
            elif isinstance(event, TokenBatch):
                # The first token tells that the prompt is computed.
                assert len(known) >= len(PROMPT) // SIZE
                if event.sequences[0].finish_reason is not None:
                    break
        await decode.send(ResyncCache())
        async with asyncio.timeout(30):
            while not (isinstance(event := await decode.any_event(), CacheUpdate) and event.begins):
                pass
        assert set(unpack_keys(event.stored)) == known

        older = Session(decode.info)
        await older.send(Hello("older", Protocol(1, 0, ("guidance",))))
        assert isinstance(await older.any_event(), Welcome)
        await older.send(RunLocal(SPEC))
        while True:
            event = await older.any_event()
            assert isinstance(event, TokenBatch), "an older router gets no updates"
            if event.sequences[0].finish_reason is not None:
                break
        await older.close()
