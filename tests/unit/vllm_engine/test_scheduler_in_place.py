"""Sequences whose KV one worker's vLLM reads from another's."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kv_transfer.lease import Lease
from kvrelay.clock import ManualClock
from kvrelay.engine.kvcache.kv_cache import KvCache
from kvrelay.engine.sampling.sampler import Sampled
from kvrelay.types.requests import SamplingParams, SequenceSpec
from kvrelay.vllm_engine.engine import StepResult
from kvrelay.vllm_engine.exchange import Exchange
from kvrelay.vllm_engine.nixl.remote_reads import RemoteReads
from kvrelay.vllm_engine.scheduler import Limits, VllmScheduler
from kvrelay.wire.kv_frame import VllmBlocks
from kvrelay.worker.sequence import Sequence

SIZE, TOTAL, LENGTH = 4, 40, 10
LIMITS = Limits(64, frozenset({1}), 16, TOTAL)
HELD = VllmBlocks("engine", "s1-0123abcd", "127.0.0.1", 5600, (5, 6, 7), 20.0, 4.0)


class Ends:
    """A scheduler of a worker of one pool, and one sequence."""

    def __init__(self, *, leaves: bool) -> None:
        self.exchange = Exchange()
        # Promises of vLLM's blocks.
        self.cache = KvCache(TOTAL, SIZE, prefix_cache=False)
        self.reads = RemoteReads(ManualClock(10.0))
        self.scheduler = VllmScheduler(
            self.cache, self.exchange, LIMITS, leaves=leaves, reads=self.reads
        )
        params = SamplingParams(max_tokens=8, seed=0)
        spec = SequenceSpec("r", 0, tuple(range(2, 2 + LENGTH)), LENGTH, params)
        self.sequence = Sequence(spec, 0.0, self.cache.hasher(""))

    def commit(self) -> asyncio.Future[int]:
        """A prefill worker hands the sequence over."""
        sequence = self.sequence
        sequence.take_blocks(self.cache, LENGTH)
        lease = Lease(1, 1, sequence.spec.key, tuple(sequence.blocks), 0, num_tokens=LENGTH)
        receipt = self.reads.expect(lease, HELD)
        sequence.num_computed = LENGTH
        sequence.append(9, LIMITS.eos_token_ids, LIMITS.max_model_len)
        self.scheduler.join(sequence, now=0.0)
        return receipt

    def step(self, result: StepResult) -> None:
        self.scheduler.next()
        self.scheduler.complete(result, 1.0)


def test_a_prompt_stays_in_vllm_until_it_is_handed_over() -> None:
    prefill = Ends(leaves=True)
    prefill.scheduler.add(prefill.sequence)
    (start,), _ = prefill.scheduler.next()
    assert start.transfer == {"do_remote_decode": True}
    assert not prefill.sequence.blocks, "there is no staging memory"
    prefill.scheduler.complete(StepResult(drawn={"s1": Sampled(7)}, held={"s1": HELD}), 1.0)
    assert prefill.scheduler.take_held(prefill.sequence) == HELD
    prefill.scheduler.remove(prefill.sequence)
    assert not prefill.exchange.released, "the decode worker's vLLM ends the hold"


def test_blocks_that_nobody_takes_are_released() -> None:
    """The answer ended with its first token, or the sampler failed."""
    prefill = Ends(leaves=True)
    prefill.scheduler.add(prefill.sequence)
    prefill.step(StepResult(drawn={"s1": Sampled(7)}, held={"s1": HELD}))
    prefill.scheduler.remove(prefill.sequence)
    assert list(prefill.exchange.released) == [HELD.request_id]


def test_a_prompt_that_ended_while_it_was_computed_is_released() -> None:
    prefill = Ends(leaves=True)
    prefill.scheduler.add(prefill.sequence)
    prefill.scheduler.next()
    prefill.scheduler.remove(prefill.sequence)
    prefill.scheduler.complete(StepResult(held={"s1": HELD}), 1.0)
    assert list(prefill.exchange.released) == [HELD.request_id]


@pytest.mark.parametrize(
    ("tokens", "failed", "blocks"), [(10, False, 3), (2, False, 1), (10, True, 0)]
)
async def test_the_receipt_counts_what_vllm_read(tokens: int, blocks: int, *, failed: bool) -> None:
    decode = Ends(leaves=False)
    receipt = decode.commit()
    (start,), _ = decode.scheduler.next()
    assert start.transfer is not None
    assert start.transfer["do_remote_prefill"]
    assert start.transfer["remote_block_ids"] == [[5, 6, 7]]
    read = decode.exchange.sequences[start.name].read
    assert read is not None
    # In vLLM's thread.
    read.tokens, read.failed = tokens, failed
    decode.scheduler.complete(StepResult(reading={start.name}), 1.0)
    assert read.running
    assert not receipt.done()
    assert decode.sequence.blocks, "the lease's room is promised until vLLM has it"
    decode.step(StepResult(progress={start.name: (LENGTH + 1, 0)}, drawn={start.name: Sampled(7)}))
    assert await receipt == blocks
    assert not decode.sequence.blocks
    assert decode.cache.pool.num_free == TOTAL


async def test_a_prompt_that_is_computed_here_reads_nothing() -> None:
    decode = Ends(leaves=False)
    decode.scheduler.add(decode.sequence)
    (start,), _ = decode.scheduler.next()
    assert start.transfer is None


async def test_leases_leave_room_in_vllms_memory() -> None:
    decode = Ends(leaves=False)
    decode.sequence.take_blocks(decode.cache, LENGTH)
    other = replace(decode.sequence.spec, request_id="other")
    decode.scheduler.add(Sequence(other, 0.0, decode.cache.hasher("")))
    free = decode.cache.pool.units_available - decode.scheduler.units_awaited(0)
    assert free == TOTAL - 3 - 4, "a lease of three blocks, and a sequence with its next block"
