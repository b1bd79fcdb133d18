"""One answer on its way to its client."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.clock import MonotonicClock
from kvrelay.errors import DeadlineExceeded
from kvrelay.types.requests import SamplingParams, TokenLogprobs
from kvrelay.wire.inference import GenerateResponse
from router.core.effects import Emit, End
from router.core.lifecycle import Lifecycle, Settings
from router.core.request import Request
from router.core.retry_budget import RetryBudget
from router.runtime.stream import Stream
from router.runtime.stream_reader import StreamReader
from router.runtime.write_scheduler import WriteScheduler


class Words:
    """A sink whose tokens are their numbers."""

    stopped = False
    stop_string: str | None = None

    def push(self, token_id: int) -> str:
        return f" {token_id}"

    def finish(self) -> str:
        return ""


@pytest.fixture
def stream() -> Stream:
    return new_stream()


def new_stream() -> Stream:
    request = Request("a", (1, 2, 3), SamplingParams(seed=0), arrival=0.0, deadline=60.0)
    life = Lifecycle(
        request, Settings(max_attempts=3, lease_seconds=10.0, transport="auto"), RetryBudget()
    )
    return Stream(life, Words(), MonotonicClock(), WriteScheduler())


def emit(index: int, *token_ids: int) -> Emit:
    return Emit("a", index, token_ids, (), "local")


async def test_tokens_that_wait_are_sent_together(stream: Stream) -> None:
    stream.push(emit(0, 5), 1.0)
    stream.push(emit(1, 6, 7), 1.1)
    stream.end(End("a", "length"), 1.1)
    (only,) = [one async for _, one in StreamReader([stream]).responses()]
    assert (only.index, only.token_ids, only.text, only.finish_reason) == (
        0,
        (5, 6, 7),
        " 5 6 7",
        "length",
    )


async def test_an_error_does_not_pass_for_the_end_of_an_answer(stream: Stream) -> None:
    """Tokens that came just before it are sent, as tokens of an answer that goes on."""
    stream.push(emit(0, 5), 1.0)
    stream.end(End("a", "error", DeadlineExceeded("too late")), 1.0)
    responses = StreamReader([stream]).responses()
    _, first = await anext(responses)
    assert (first.token_ids, first.finish_reason, first.ledger) == ((5,), None, None)
    with pytest.raises(DeadlineExceeded):
        await anext(responses)


async def test_a_reader_that_left_takes_nothing_along(stream: Stream) -> None:
    left = StreamReader([stream]).responses()
    waiting = anext(left).__await__()
    waiting.send(None)
    waiting.close()
    stream.push(emit(0, 5), 1.0)
    stream.end(End("a", "stop"), 1.0)
    (only,) = [one async for _, one in StreamReader([stream]).responses()]
    assert only.token_ids == (5,)


async def test_tokens_that_come_before_an_error_while_the_client_is_busy_are_sent(
    stream: Stream,
) -> None:
    stream.push(emit(0, 5), 1.0)
    responses = StreamReader([stream]).responses()
    assert (await anext(responses))[1].token_ids == (5,)
    stream.push(emit(1, 6, 7), 1.1)
    stream.end(End("a", "error", DeadlineExceeded("too late")), 1.2)
    assert (await anext(responses))[1].token_ids == (6, 7)
    with pytest.raises(DeadlineExceeded):
        await anext(responses)


async def test_a_stop_string_that_the_last_allowed_token_completes_is_the_reason_for_all(
    stream: Stream,
) -> None:
    class Stops(Words):
        def push(self, token_id: int) -> str:
            self.stopped = True
            return ""

    stream = Stream(stream.life, Stops(), MonotonicClock(), WriteScheduler())
    assert not stream.push(emit(0, 5), 1.0)
    stream.end(End("a", "length"), 1.0)
    (only,) = [one async for _, one in StreamReader([stream]).responses()]
    assert stream.ended is not None
    assert (only.finish_reason, stream.ended.finish_reason) == ("stop", "stop")


async def test_streams_of_one_reader_come_as_their_tokens_do(stream: Stream) -> None:
    other = Stream(stream.life, Words(), MonotonicClock(), stream.write_scheduler)
    responses = StreamReader([stream, other]).responses()
    other.push(emit(0, 5), 1.0)
    stream.push(emit(0, 6), 1.0)
    assert [(await anext(responses))[0] for _ in range(2)] == [0, 1]
    other.push(emit(1, 7), 1.1)
    index, response = await anext(responses)
    # While the client is busy, all that comes is joined.
    other.push(emit(2, 8), 1.2)
    other.push(emit(3, 9), 1.3)
    other.end(End("a", "stop"), 1.3)
    stream.end(End("a", "length"), 1.4)
    rest = [(index, one.token_ids, one.finish_reason) async for index, one in responses]
    assert (index, response.token_ids) == (1, (7,))
    assert rest == [(1, (8, 9), "stop"), (0, (), "length")]


@settings(deadline=None)
@given(st.lists(st.integers(0, 150), max_size=6), st.sampled_from(["length", "error"]))
def test_tokens_with_logprobs_come_in_small_responses(batches: list[int], reason: str) -> None:
    """None is lost or said twice, and only the last response ends the answer."""

    async def read(stream: Stream) -> list[GenerateResponse]:
        found = []
        reader = StreamReader([stream]).responses()
        position = 0
        for count in batches:
            token_ids = tuple(range(position, position + count))
            scores = tuple(TokenLogprobs(-float(one), ()) for one in token_ids)
            stream.push(Emit("a", position, token_ids, scores, "local"), 1.0)
            position += count
            if count:
                found.append((await anext(reader))[1])
        error = DeadlineExceeded("too late") if reason == "error" else None
        stream.end(End("a", reason, error), 1.1)  # type: ignore[arg-type]
        with suppress(DeadlineExceeded):
            async for _, one in reader:
                found.append(one)
        return found

    found = asyncio.run(read(new_stream()))
    token_ids = [token_id for one in found for token_id in one.token_ids]
    assert token_ids == list(range(sum(batches)))
    assert "".join(one.text for one in found) == "".join(f" {one}" for one in token_ids)
    assert [one.logprob for part in found for one in part.logprobs] == [-one for one in token_ids]
    assert all(len(one.token_ids) <= 64 for one in found)
    assert all(one.index == one.token_ids[0] for one in found if one.token_ids)
    ends = [one.finish_reason for one in found if one.finish_reason is not None]
    assert ends == ([] if reason == "error" else ["length"])
