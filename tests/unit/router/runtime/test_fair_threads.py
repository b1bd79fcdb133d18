"""Slices on the event loop, and threads, as tenants share them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.router_harness import DEMO

from kvrelay.errors import InvalidArgument
from kvrelay.tenants import Tenant
from kvrelay.tokenizer.tokenizer import Tokenizer
from router.frontend.tokenization import INLINE, SHORT, THREADS, Text, TokenBound
from router.runtime.fair_threads import FairThreads
from router.runtime.loop_slices import SLICE, LoopSlices

HOSTILE, GUEST = Tenant("hostile"), Tenant("guest")
TOKENIZER = Tokenizer.load(DEMO)


def steps(said: list[str], name: str, number: int) -> Generator[int, None, str]:
    for _ in range(number):
        said.append(name)
        yield SLICE
    return name


async def test_between_two_slices_the_loop_serves_others_and_tenants_take_turns() -> None:
    slices, said = LoopSlices(), list[str]()

    async def stream() -> None:
        while True:
            said.append("stream")
            await asyncio.sleep(0)

    streaming = asyncio.create_task(stream())
    hostile = [
        asyncio.create_task(slices.run(HOSTILE, steps(said, "hostile", 50))) for _ in range(4)
    ]
    await asyncio.sleep(0)
    assert await slices.run(GUEST, steps(said, "guest", 5)) == "guest"
    assert said.count("guest") == 5
    assert said.count("hostile") <= 12, "not one after the other: tenant after tenant"
    assert said.count("stream") >= 5
    hostile[0].cancel()
    assert await asyncio.gather(*hostile[1:]) == ["hostile"] * 3
    assert said.count("hostile") < 4 * 50, "what was cancelled is not finished"
    streaming.cancel()


async def test_short_jobs_of_one_moment_are_one_slice_of_a_round() -> None:
    """Each of them would find no other job waiting."""
    slices, rounds = LoopSlices(), Counter[int]()
    number = 0

    async def count_rounds() -> None:
        nonlocal number
        while True:
            number += 1
            await asyncio.sleep(0)

    def short() -> Generator[int, None, None]:
        yield SLICE // 4
        rounds[number] += 1

    counting = asyncio.create_task(count_rounds())
    await asyncio.gather(*(slices.run(HOSTILE, short()) for _ in range(100)))
    assert max(rounds.values()) <= 4
    # A job that comes later is not behind them.
    at_once = number
    await slices.run(GUEST, short())
    assert number - at_once <= 2
    counting.cancel()


async def test_an_error_is_its_own_jobs_and_the_others_go_on() -> None:
    def broken() -> Generator[int, None, None]:
        yield SLICE
        raise InvalidArgument("broken")

    slices, said = LoopSlices(), list[str]()
    good = asyncio.create_task(slices.run(GUEST, steps(said, "guest", 3)))
    with pytest.raises(InvalidArgument, match="broken"):
        await slices.run(HOSTILE, broken())
    assert await good == "guest"
    assert await slices.run(GUEST, steps(said, "guest", 0)) == "guest"


@pytest.fixture
async def threads() -> AsyncIterator[FairThreads]:
    made = FairThreads(THREADS, SHORT, "test")
    yield made
    made.close()


async def test_a_short_text_does_not_wait_for_long_ones_of_another_tenant(
    threads: FairThreads,
) -> None:
    release, begun = threading.Event(), threading.Event()

    def long() -> None:
        begun.set()
        release.wait()

    jobs = [asyncio.create_task(threads.run(HOSTILE, SHORT + 1, long)) for _ in range(12)]
    try:
        async with asyncio.timeout(60):
            while not begun.is_set():
                await asyncio.sleep(0.01)
            for _ in range(20):
                assert await threads.run(GUEST, SHORT, lambda: "short") == "short"
        assert not any(one.done() for one in jobs)
        jobs[-1].cancel()  # while it waits
        for _ in range(3):  # while it runs: its lane is not free before its thread is
            jobs[0].cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not jobs[0].done()
    finally:
        release.set()
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in results] == [
        True,
        *[False] * 10,
        True,
    ]


async def test_a_text_that_cannot_fit_is_refused_without_a_thread() -> None:
    text = Text.load(DEMO)
    release = threading.Event()
    jobs = [
        asyncio.create_task(text._threads.run(HOSTILE, 1, release.wait)) for _ in range(THREADS)
    ]
    try:
        await asyncio.sleep(0)
        for sent in ("a" * 4_000_000, "the dog " * 500_000):
            async with asyncio.timeout(60):
                with pytest.raises(
                    InvalidArgument, match=r"prompt has at least [0-9]+ tokens, and the context"
                ) as told:
                    await text.encode(sent, tenant=GUEST, bound=TokenBound.of_context(4096))
            assert told.value.field == "prompt"
    finally:
        release.set()
        await asyncio.gather(*jobs)
    with pytest.raises(InvalidArgument, match="prompt has 6001 tokens, and the context holds 4096"):
        await text.encode("1" * 6000, tenant=GUEST, bound=TokenBound.of_context(4096))
    assert (
        len(await text.encode("1" * (INLINE + 1), tenant=GUEST, bound=TokenBound.of_context(4096)))
        == INLINE + 2
    )
    await text.close()


@given(
    st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=200),
    st.sampled_from(["a", " ", "\n", "the dog ", "\N{GRINNING FACE}", "<s>", "</s>", "e\u0301"]),
    st.integers(0, 300),
)
def test_no_text_has_fewer_tokens_than_its_length_says(text: str, word: str, number: int) -> None:
    for one in (text, word * number, text + word * number):
        assert TOKENIZER.fewest_tokens(one) <= len(TOKENIZER.encode(one, add_special_tokens=False))
        assert TOKENIZER.encode_within(one, 10**6) == TOKENIZER.encode(one)
