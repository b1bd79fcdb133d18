"""Named points of the protocol in a worker process, at which a test has it stop, die or wait.

The request's own id says so: `row-02!stop@chunk` stops the process that computes the first chunk of
it. Several are joined by `!`. Only the attempt that comes there first is meant, unless the point
ends with `*`. Whatever is done, the test is told first that the point was reached.

what    tell     nothing else
        stop     the process sends itself SIGSTOP; the test kills it or lets it go on
        die      the process sends itself SIGKILL
        hold     what goes on there waits until the sequence is gone or SIGUSR1 comes; `hold0.2`
                 waits so many seconds
        jump     the process's clock of the day goes 5 minutes forward
        flip, truncate, twice, reorder    at `frames`: what is done to the first blocks that come

point   unstarted    prefill: the prompt is accepted, and not begun
        chunk        prefill: the first of several chunks is computed
        token:K      either: token K, and maybe later ones, are about to be sent to the router
        reserved     decode: blocks are reserved
        frames       decode: blocks have come, and were not looked at
        arrived      decode: the first blocks have been written
        refused      decode: a push is refused; told with the reason
        committing   decode: the commit has come, and was not looked at
        committed    decode: the decode worker has the sequence, the prefill worker was not told
        joined       decode: the sequence is in the batch, and no step with it has begun
        sampled:K    decode: K tokens of this attempt are computed, and the next step has not begun
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kv_transfer.receiver import Receiver
from kvrelay.errors import KvRelayError
from kvrelay.vllm_engine.step_loop import VllmStepLoop
from kvrelay.wire.transfer import KvBlocks, KvCommit, KvOpen, frame_from_bytes, frame_to_bytes
from kvrelay.worker.session import RouterSession
from kvrelay.worker.steps.step_loop import StepLoop
from kvrelay.worker_messages import Reserved, TokenBatch

HOLD_S = 30.0  # at most
JUMP_S = 300.0

Key = tuple[str, int]
Tell = Callable[[dict[str, object]], None]


class Points:
    """Of one process."""

    def __init__(self, tell: Tell, folder: Path) -> None:
        """`folder` is the same for all processes, and notes who came first."""
        self._tell = tell
        self._folder = folder
        self._reached: dict[tuple[Key, str], str] = {}
        self._freed = asyncio.Event()

    def reach(self, key: Key, point: str, said: str = "") -> str:
        """To be called there, as often as one likes; what is to be done there, or nothing."""
        if (key, point) not in self._reached:
            self._reached[key, point] = what = self._claim(key, point)
            if what == "jump":
                said = _set_clock_forward()
            if what:
                self._tell({"request_id": key[0], "attempt": key[1], "point": point, "said": said})
            if what in ("stop", "die"):
                os.kill(os.getpid(), signal.SIGSTOP if what == "stop" else signal.SIGKILL)
        return self._reached[key, point]

    def _claim(self, key: Key, point: str) -> str:
        what, always = _wanted(key[0], point)
        if not what or always:
            return what
        try:
            (self._folder / f"{key[0]} at {point}").touch(exist_ok=False)
        except FileExistsError:
            return ""
        return what

    async def wait(self, key: Key, point: str) -> None:
        """Where a hold is over when the task is cancelled."""
        if (what := self.reach(key, point)).startswith("hold"):
            with suppress(TimeoutError):
                async with asyncio.timeout(float(what.removeprefix("hold") or HOLD_S)):
                    await self._freed.wait()

    def let_go(self) -> None:
        """Ends the holds that are under way."""
        self._freed.set()
        self._freed = asyncio.Event()
        self._reached = {
            where: "" if what == "hold" else what for where, what in self._reached.items()
        }

    def install(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.let_go)
        self._in_sessions()
        self._in_steps()
        self._in_receiver()

    def _in_sessions(self) -> None:
        send = RouterSession.send

        def watched(session: RouterSession, event: Any) -> None:
            if isinstance(event, Reserved):
                self.reach((event.request_id, event.attempt), "reserved")
            for one in event.sequences if isinstance(event, TokenBatch) else ():
                for index in range(one.index, one.index + len(one.token_ids)):
                    self.reach((one.request_id, one.attempt), f"token:{index}")
            send(session, event)

        RouterSession.send = watched  # type: ignore[method-assign]

    def _in_steps(self) -> None:
        self._in_loop(StepLoop)
        self._in_loop(VllmStepLoop)

    def _in_loop(self, kind: Any) -> None:
        step = kind.step

        def held(loop: Any) -> bool:
            wishes = [
                self.reach(one.spec.key, point)
                for one in loop._scheduler
                for point in _between_steps(one)
            ]
            return "hold" in wishes

        async def watched(loop: Any) -> None:
            while held(loop):
                await asyncio.sleep(0.001)
            await step(loop)

        kind.step = watched

    def _in_receiver(self) -> None:
        receive, write = Receiver._receive, Receiver._write

        async def watched(receiver: Receiver, frames: AsyncIterator[Any], context: Any) -> Any:
            keys: list[Key] = []
            try:
                async with aclosing(self._frames(frames, keys)) as through:
                    receipt = await receive(receiver, through, context)
            except KvRelayError as error:
                if keys:
                    self.reach(keys[0], "refused", error.message)
                raise
            await self.wait(keys[0], "committed")
            return receipt

        async def watched_write(receiver: Receiver, opening: Any, *rest: Any) -> None:
            await write(receiver, opening, *rest)
            await self.wait((opening.request_id, opening.attempt), "arrived")

        Receiver._receive = watched  # type: ignore[method-assign]
        Receiver._write = watched_write  # type: ignore[method-assign]

    async def _frames(
        self, frames: AsyncIterator[Any], keys: list[Key]
    ) -> AsyncGenerator[Any, None]:
        """Notes whose they are."""
        kept: list[KvBlocks] = []
        async for frame in frames:
            match frame:
                case KvOpen():
                    keys.append((frame.request_id, frame.attempt))
                case KvBlocks() if not kept and (what := self.reach(keys[0], "frames")):
                    kept.append(frame)
                    if what == "reorder":
                        continue
                    if what == "twice":
                        yield frame
                    elif what == "flip":
                        payload = bytearray(b"".join(frame.payload))
                        payload[len(payload) // 2] ^= 4
                        frame = replace(frame, payload=(memoryview(payload),))
                    elif what == "truncate":
                        # Which raises what a connection would
                        frame = frame_from_bytes(frame_to_bytes(frame)[:-7])
                case KvBlocks() if len(kept) == 1 and self.reach(keys[0], "frames") == "reorder":
                    kept.append(frame)
                    yield frame
                    frame = kept[0]
                case KvCommit():
                    await self.wait(keys[0], "committing")
            yield frame


def _wanted(request_id: str, point: str) -> tuple[str, bool]:
    """What to do there, and whether each time."""
    for one in request_id.split("!")[1:]:
        what, _, where = one.partition("@")
        if where.rstrip("*") == point:
            return what, where.endswith("*")
    return "", False


def _between_steps(sequence: Any) -> tuple[str, ...]:
    """Points that a scheduled sequence is at between two steps."""
    sampled = sequence.num_emitted - sequence.spec.num_emitted
    if sampled:
        return ("joined",) if sampled == 1 else (f"sampled:{sampled}",)
    return ("unstarted",) if sequence.started is None else ("chunk",)


def _set_clock_forward() -> str:
    """Returns what time it is then, in Unix seconds."""
    right = time.time
    time.time = lambda: right() + JUMP_S
    return str(time.time())


def teller(descriptor: int, number: int) -> Tell:
    """Writes lines of JSON, each whole: they are shorter than a pipe takes at once. `number` is the
    worker's.
    """

    def tell(message: dict[str, object]) -> None:
        os.write(descriptor, json.dumps({"number": number, **message}).encode() + b"\n")

    return tell
