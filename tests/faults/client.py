"""A client that writes down what it sees: the raw stream, without what the SDK would mend."""

from __future__ import annotations

import asyncio
import time

import grpc
from faults.history import WHOLE, BrokeOff, Called, Ended, Received, RequestHistory

from kvrelay.wire import inference as wire
from kvrelay.wire.status import error_from_rpc

# Statuses after which a client resumes elsewhere
MAY_GO_ON = frozenset({"UNAVAILABLE", "DATA_LOSS"})


class Asking:
    """One request under way. Every target is called once, the next one with the tokens that came
    from those before.
    """

    def __init__(
        self,
        history: RequestHistory,
        request: wire.GenerateRequest,
        *channels: grpc.aio.Channel,
        timeout: float | None,
    ) -> None:
        self.history = history
        self._request = request
        self._channels = channels
        self._timeout = timeout
        self.num_tokens = 0  # that came
        self._call: grpc.aio.UnaryStreamCall | None = None
        self._left = False
        self._news = asyncio.Condition()
        self.task = asyncio.create_task(self._run())

    async def tokens(self, count: int) -> None:
        """Until so many have come. Raises AssertionError if the answer ends before."""
        async with asyncio.timeout(60), self._news:
            await self._news.wait_for(lambda: self.num_tokens >= count or self.history.ends)
        assert self.num_tokens >= count, (
            f"{self.history.request_id} ended with {self.num_tokens} tokens: {self.history.end}"
        )

    async def ended(self) -> RequestHistory:
        async with asyncio.timeout(120):
            await asyncio.shield(self.task)
        return self.history

    def cancel(self) -> float:
        """Returns when."""
        assert self._call is not None, "nothing was called yet"
        self._left = True
        self._call.cancel()
        return time.monotonic()

    async def _run(self) -> None:
        for channel in self._channels:
            last = channel is self._channels[-1]
            end = await self._call_once(channel)
            broke_off = isinstance(end, Ended) and end.status in MAY_GO_ON | (
                set() if self._left else {"CANCELLED"}
            )
            if isinstance(end, Ended) and broke_off and not last:
                end = BrokeOff(end.at, end.status)
            await self._note(end)
            if isinstance(end, Ended):
                return

    async def _call_once(self, channel: grpc.aio.Channel) -> Ended | BrokeOff:
        message = wire.request_to_proto(self._request)
        message.resume.extend(self.history.token_ids)
        await self._note(Called(time.monotonic(), self.num_tokens))
        self._call = wire.InferenceServiceStub(channel).Generate(message, timeout=self._timeout)
        end: Ended | None = None
        try:
            async for answer in self._call:
                response = wire.response_from_proto(answer)
                if response.token_ids:
                    await self._note(Received(time.monotonic(), response.index, response.token_ids))
                if response.finish_reason is not None:
                    attempts = response.ledger.attempts if response.ledger is not None else ()
                    if end is not None:
                        await self._note(end)  # a second one, which `check_one_end` is for
                    end = Ended(time.monotonic(), response.finish_reason, attempts)
        except grpc.aio.AioRpcError as error:
            typed = error_from_rpc(error)
            return Ended(
                time.monotonic(), error.code().name, (), typed.retry_after_s, typed.message
            )
        except asyncio.CancelledError:
            if asyncio.current_task() in _cancelling():
                raise
            return Ended(time.monotonic(), "CANCELLED")
        return end or BrokeOff(time.monotonic(), "OK without an end")

    async def _note(self, event: Called | Received | BrokeOff | Ended) -> None:
        self.history.events.append(event)
        if isinstance(event, Received):
            self.num_tokens += len(event.token_ids)
        async with self._news:
            self._news.notify_all()


def _cancelling() -> set[asyncio.Task[object]]:
    return {task for task in asyncio.all_tasks() if task.cancelling()}


def whole(history: RequestHistory) -> bool:
    return history.end.status in WHOLE
