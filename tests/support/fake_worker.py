"""A worker that speaks the session protocol and computes nothing: its next token is a hash of the
prefix.

The pure part, FakeWorker, takes commands and gives events; FakeWorkerServer puts one behind a real
gRPC server.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import grpc
import xxhash

from kvrelay.errors import Code, KvRelayError
from kvrelay.protocol_version import GUIDANCE, PROMPT_LOGPROBS, THINKING_BUDGET, Protocol
from kvrelay.state.registry import Registry
from kvrelay.types.requests import (
    FinishReason,
    Handoff,
    PrefillTimings,
    PromptLogprobs,
    SequenceSpec,
    TokenLogprobs,
)
from kvrelay.types.workers import PoolName, WorkerInfo
from kvrelay.wire.worker import (
    Hello,
    Welcome,
    WorkerServiceServicer,
    add_WorkerServiceServicer_to_server,
    command_from_proto,
    command_key,
    event_to_proto,
    pb,
)
from kvrelay.worker_messages import (
    SEQUENCE_FAULT,
    Abort,
    Command,
    Event,
    Failed,
    HandedOff,
    HandoffTarget,
    Prefill,
    Refused,
    Renew,
    Reserve,
    Reserved,
    RunLocal,
    SequenceTokens,
    TokenBatch,
)

VOCAB = 300  # of the tokens that come out; below the demo model's
Key = tuple[str, int]


def next_token(token_ids: tuple[int, ...], seed: int) -> int:
    """Never a special token of the demo model (those are below 8 and above 330)."""
    digest = xxhash.xxh3_64_intdigest(repr((token_ids, seed)).encode())
    return 10 + digest % (VOCAB - 10)


def answer(prompt: tuple[int, ...], seed: int, count: int) -> list[int]:
    """What any number of fake workers give together, whatever happens to them."""
    token_ids = prompt
    for _ in range(count):
        token_ids += (next_token(token_ids, seed),)
    return list(token_ids[len(prompt) :])


@dataclass
class Running:
    """A sequence on a decode worker."""

    spec: SequenceSpec
    token_ids: tuple[int, ...]
    lease_id: int
    committed: bool = False
    # The whole answer, instead of hashes.
    says: tuple[int, ...] = ()

    def advance(self, count: int) -> SequenceTokens:
        """So many more tokens, finished at max_tokens."""
        one = self._next()
        if count == 1 or one.finish_reason is not None:
            return one
        more = self.advance(count - 1)
        return replace(
            one,
            token_ids=one.token_ids + more.token_ids,
            logprobs=one.logprobs + more.logprobs,
            finish_reason=more.finish_reason,
        )

    def _next(self) -> SequenceTokens:
        index = len(self.token_ids) - self.spec.prompt_len
        sampling = self.spec.sampling
        token = self.says[index] if self.says else next_token(self.token_ids, sampling.seed or 0)
        self.token_ids += (token,)
        finish: FinishReason | None = "length" if index + 1 >= sampling.max_tokens else None
        if index + 1 == len(self.says):
            finish = "stop"
        logprobs = (
            () if sampling.logprobs is None else (TokenLogprobs(-0.5, ((token, -0.5), (9, -1.5))),)
        )
        timings = PrefillTimings(0.0, 0.001, 0, 1) if index == self.spec.num_emitted else None
        scores = None if index else self._prompt_logprobs()
        return SequenceTokens(*self.spec.key, index, (token,), logprobs, finish, timings, scores)

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        """-0.1 for the second token, -0.2 for the third, ...; the token itself is the likeliest,
        then token 9, 10, ...
        """
        count, later = self.spec.sampling.prompt_logprobs, self.spec.token_ids[1:]
        if count is None:
            return None
        own = [-0.1 * place for place in range(1, len(later) + 1)]
        ids = [one for token in later for one in (token, *range(9, 8 + count))[:count]]
        likely = [logprob - place for logprob in own for place in range(count)]
        return PromptLogprobs(array("f", own), array("i", ids), array("f", likely))


@dataclass
class FakeWorker:
    """Of either pool. Everything that it holds is in `sequences` (decode) and `prompts`
    (prefill).
    """

    info: WorkerInfo
    slots: int = 8
    refuse: str = ""  # a reason: every Reserve, RunLocal and Prefill is refused with it
    fail: Code | None = None  # every sequence fails with it
    fail_text: str = "told to fail"
    # Whether the model has no next token for a sequence
    faults: Callable[[SequenceSpec], bool] = lambda _: False
    sequences: dict[Key, Running] = field(default_factory=dict)
    prompts: dict[Key, Prefill] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    known: set[Key] = field(default_factory=set)  # all that it was ever told to take
    leases: int = 0
    tokens_per_step: int = 1  # more, as where guesses were right
    says: tuple[int, ...] = ()  # the tokens of every answer

    def handle(self, command: Command) -> list[Event]:
        self.commands.append(command)
        if isinstance(command, Reserve | RunLocal | Prefill):
            if command.spec.key in self.known:
                return []  # each command is run, or refused, once
            self.known.add(command.spec.key)
        match command:
            case Reserve(spec) | RunLocal(spec) | Prefill(spec) if self.refuse:
                return [Refused(*spec.key, self.refuse)]
            case Reserve(spec) | RunLocal(spec) | Prefill(spec) if self.fail is not None:
                return [Failed(*spec.key, self.fail, self.fail_text)]
            case RunLocal(spec) | Prefill(spec) if self.faults(spec):
                return [Failed(*spec.key, Code.INTERNAL, f"{SEQUENCE_FAULT}: no distribution")]
            case Reserve(spec) | RunLocal(spec) if len(self.sequences) >= self.slots:
                return [Refused(*spec.key, "full")]
            case Reserve(spec):
                return [self._reserve(spec)]
            case RunLocal(spec):
                self.sequences[spec.key] = Running(spec, spec.token_ids, 0, True, self.says)
            case Prefill(spec):
                self.prompts[spec.key] = command
            case Abort(request_id, attempt):
                self.sequences.pop((request_id, attempt), None)
                self.prompts.pop((request_id, attempt), None)
            case Renew():
                pass
        return []

    def _reserve(self, spec: SequenceSpec) -> Event:
        self.leases += 1
        self.sequences[spec.key] = Running(spec, spec.token_ids, self.leases, says=self.says)
        target = HandoffTarget(
            worker_id=self.info.worker_id,
            address=self.info.address,
            epoch=self.info.epoch,
            lease_id=self.leases,
            generation=1,
            num_blocks=1,
            cached_tokens=0,
            layout_hash=self.info.layout_hash,
            host_id=self.info.host_id,
        )
        return Reserved(*spec.key, target)

    def prefill(self, key: Key, decode: FakeWorker | None) -> list[Event]:
        """Computes one prompt and hands it to `decode`: the first token, then the account or a
        failure.
        """
        prompt = self.prompts.pop(key)
        first = Running(prompt.spec, prompt.spec.token_ids, 0, says=self.says).advance(1)
        events: list[Event] = [TokenBatch((first,))]
        if first.finish_reason is not None:
            return events
        if decode is None or not decode.commit(prompt.target, key, first.token_ids[0]):
            return [
                *events,
                Failed(*key, Code.UNAVAILABLE, f"{prompt.target.worker_id} did not take the KV"),
            ]
        return [*events, HandedOff(*key, Handoff("fake", 1, 64, 64, 0, 0.001, 0.0005))]

    def commit(self, target: HandoffTarget, key: Key, token: int) -> bool:
        running = self.sequences.get(key)
        if (
            running is None
            or target.epoch != self.info.epoch
            or running.lease_id != target.lease_id
        ):
            return False
        if not running.committed:
            running.committed = True
            running.token_ids += (token,)
        return True

    def step(self) -> list[Event]:
        """Tokens for every sequence that has its KV."""
        ready = [one for one in self.sequences.values() if one.committed]
        tokens = tuple(one.advance(self.tokens_per_step) for one in ready)
        for one in tokens:
            if one.finish_reason is not None:
                del self.sequences[one.request_id, one.attempt]
        return [TokenBatch(tokens)] if tokens else []


def worker_info(worker_id: str, pool: PoolName, address: str = "", epoch: int = 1) -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker_id,
        pool=pool,
        epoch=epoch,
        state="ready",
        address=address,
        model_id="fake",
        layout_hash="fake",
        block_size=16,
        block_bytes=64,
        host_id="here",
        max_model_len=4096,
        protocol=Protocol(features=(GUIDANCE, PROMPT_LOGPROBS, THINKING_BUDGET)),
    )


class FakeWorkerServer(WorkerServiceServicer):
    """One fake worker on a real port. `peers` finds the decode workers that a prefill worker hands
    over to.
    """

    def __init__(
        self, worker_id: str, pool: PoolName, peers: dict[str, FakeWorkerServer], epoch: int = 1
    ) -> None:
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 500),
            ]
        )
        add_WorkerServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.worker = FakeWorker(worker_info(worker_id, pool, f"127.0.0.1:{port}", epoch))
        # Cleared: the worker holds what it has and computes nothing
        self.may_step = asyncio.Event()
        self.may_step.set()
        self.pace_s = 0.001  # a step
        # After so many with tokens it holds, as if may_step were cleared
        self.steps_left: int | None = None
        # With such a one it stops, to be killed
        self.poisonous: Callable[[Running], bool] = lambda _sequence: False
        self._peers = peers
        self.sessions = 0  # that routers have begun
        self._outgoing: set[asyncio.Queue[Event | pb.SessionResponse]] = set()
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        peers[worker_id] = self

    async def start(self) -> None:
        await self._server.start()
        self._task = asyncio.create_task(self._run())

    async def kill(self) -> None:
        """As a SIGKILL: connections are reset, nothing more is said."""
        self._peers.pop(self.worker.info.worker_id, None)
        if self._task is not None:
            self._task.cancel()
        await self._server.stop(None)

    def wake(self) -> None:
        self._woken.set()

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.SessionResponse]:
        hello = command_from_proto(await anext(request_iterator))
        assert isinstance(hello, Hello)
        self.sessions += 1
        events: asyncio.Queue[Event | pb.SessionResponse] = asyncio.Queue()
        self._outgoing.add(events)
        reader = asyncio.create_task(self._read(request_iterator, events))
        try:
            yield event_to_proto(
                Welcome(
                    self.worker.info.worker_id,
                    self.worker.info.epoch,
                    protocol=self.worker.info.protocol,
                )
            )
            while True:
                event = await events.get()
                yield event if isinstance(event, pb.SessionResponse) else event_to_proto(event)
        finally:
            self._outgoing.discard(events)
            reader.cancel()
            # Those of one of several routers end unheard.
            if not self._outgoing:
                self.worker.sequences.clear()
                self.worker.prompts.clear()

    def say_as_it_is(self, message: pb.SessionResponse) -> None:
        """To all routers, whatever it says."""
        for outgoing in self._outgoing:
            outgoing.put_nowait(message)

    async def _read(
        self,
        requests: AsyncIterator[pb.SessionRequest],
        events: asyncio.Queue[Event | pb.SessionResponse],
    ) -> None:
        try:
            async for message in requests:
                try:
                    command = command_from_proto(message)
                except KvRelayError as error:
                    # As a real worker: an invalid command fails alone.
                    key = command_key(message)
                    if key is not None:
                        events.put_nowait(Failed(*key, error.code, error.message))
                    continue
                assert command is not None
                assert not isinstance(command, Hello)
                for event in self.worker.handle(command):
                    events.put_nowait(event)
                self._woken.set()
        except grpc.aio.UsageError:
            return  # the call ended under the reader

    def _say(self, events: list[Event]) -> None:
        for outgoing in self._outgoing:
            for event in events:
                outgoing.put_nowait(event)

    async def _run(self) -> None:
        while True:
            await self._woken.wait()
            if any(self.poisonous(one) for one in self.worker.sequences.values()):
                self.may_step.clear()
            await self.may_step.wait()
            for key, prompt in list(self.worker.prompts.items()):
                decode = self._peers.get(prompt.target.worker_id)
                self._say(self.worker.prefill(key, decode.worker if decode else None))
                if decode is not None:
                    decode.wake()
            if self.steps_left is None or self.steps_left > 0:
                said = self.worker.step()
                self._say(said)
                if self.steps_left is not None and said:
                    self.steps_left -= 1
            if (
                not any(one.committed for one in self.worker.sequences.values())
                or self.steps_left == 0
            ):
                self._woken.clear()
            await asyncio.sleep(self.pace_s)


async def main(worker_id: str, redis_url: str) -> None:
    """A fake decode worker as a process of its own, with a heartbeat in a real registry. It has all
    adapters that are listed.
    """
    registry = await Registry.connect(redis_url)
    server = FakeWorkerServer(worker_id, "decode", {}, await registry.next_epoch())
    server.pace_s = 0.02
    await server.start()
    while True:
        ids = {one.adapter_id: None for one in await registry.adapters()}
        await registry.publish_worker(replace(server.worker.info, adapters=tuple(ids)), 2.0)
        await asyncio.sleep(0.2)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
