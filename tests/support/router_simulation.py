"""The router's pure core against misbehaving workers, in virtual time. One seed is one history.

cd tests && python -m support.router_simulation 10000     # that many seeds, from 0
"""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from dataclasses import dataclass, field, replace

import xxhash
from support.fake_worker import FakeWorker, answer, worker_info
from support.router_books import check_books

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import Cancelled, Code, DeadlineExceeded, KvRelayError, ResourceExhausted
from kvrelay.types.requests import SamplingParams
from kvrelay.types.workers import PoolName
from kvrelay.worker_messages import Command, Event
from router.core.dispatcher import Dispatcher
from router.core.effects import Effect, Emit, End, Send
from router.core.request import Request

WORKERS: dict[str, PoolName] = {
    "p0": "prefill",
    "p1": "prefill",
    "d0": "decode",
    "d1": "decode",
    "d2": "decode",
}
STEPS = 400
REQUESTS = 12
CONFIG = ClusterConfig.model_validate(
    {
        "router": {"local_below_tokens": 12, "max_queue": 8, "max_attempts": 6},
        "kv": {"block_size": 4},
    }
)


@dataclass
class Link:
    """A worker and the two ordered streams between it and the router."""

    worker: FakeWorker
    down: deque[Command] = field(default_factory=deque)
    up: deque[Event] = field(default_factory=deque)


@dataclass
class Record:
    """What the client of one request saw."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    cancelled: bool = False
    completed: bool = False  # by a stop string


class Simulation:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.dispatcher = Dispatcher(CONFIG)
        self.links: dict[str, Link] = {}
        self.epochs: Counter[str] = Counter()
        self.records: list[Record] = []
        self.faults: Counter[str] = Counter()
        self.trace = xxhash.xxh3_64()
        for worker_id in WORKERS:
            self.start(worker_id)

    # The world

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            self.trace.update(repr(effect).encode())
            match effect:
                case Send(worker_id, command):
                    if worker_id in self.links:
                        self.links[worker_id].down.append(command)
                case Emit(request_id, index, token_ids):
                    record = self.records[int(request_id)]
                    assert not record.ends, "a token after the end"
                    assert index == len(record.tokens), "a token is lost or doubled"
                    record.tokens += token_ids
                case End(request_id):
                    self.records[int(request_id)].ends.append(effect)

    def start(self, worker_id: str) -> None:
        self.epochs[worker_id] += 1
        info = worker_info(worker_id, WORKERS[worker_id], epoch=self.epochs[worker_id])
        self.links[worker_id] = Link(FakeWorker(replace(info, block_size=4), slots=3))
        self.carry_out(self.dispatcher.worker_found(self.links[worker_id].worker.info, self.now))

    def crash(self, worker_id: str) -> None:
        """What was said and not heard is lost, in both directions."""
        del self.links[worker_id]
        self.carry_out(self.dispatcher.worker_lost(worker_id, self.now))

    def submit(self) -> None:
        prompt = tuple(self.random.randrange(3) for _ in range(self.random.randint(1, 40)))
        sampling = SamplingParams(
            max_tokens=self.random.randint(1, 12), seed=self.random.randrange(100)
        )
        request = Request(
            request_id=str(len(self.records)),
            token_ids=prompt,
            sampling=sampling,
            arrival=self.now,
            deadline=self.now + self.random.choice((0.5, 5.0, 60.0)),
            priority=self.random.randrange(2),
        )
        record = Record(request)
        self.records.append(record)
        try:
            self.carry_out(self.dispatcher.submit(request, self.now)[1])
        except ResourceExhausted as error:
            self.faults["rejected"] += 1
            record.ends.append(End(request.request_id, "error", error))

    def hear(self, link: Link, again: bool = False) -> None:
        event = link.up[0] if again else link.up.popleft()
        self.carry_out(self.dispatcher.on_event(link.worker.info.worker_id, event, self.now))

    def obey(self, link: Link, again: bool = False) -> None:
        command = link.down[0] if again else link.down.popleft()
        link.up.extend(link.worker.handle(command))

    def compute(self, link: Link) -> None:
        worker = link.worker
        if worker.info.pool == "decode":
            link.up.extend(worker.step())
        elif worker.prompts:
            key, prompt = self.random.choice(list(worker.prompts.items()))
            peer = self.links.get(prompt.target.worker_id)
            link.up.extend(worker.prefill(key, peer.worker if peer else None))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.dispatcher.tick(self.now))

    # One step of a history

    def step(self) -> None:
        action = self.random.choices(
            (self.ordinary, self.pass_a_moment, self.disturb), weights=(85, 5, 10)
        )[0]
        action()
        self.check()

    def ordinary(self) -> None:
        if len(self.records) < REQUESTS and self.random.random() < 0.1:
            self.submit()
        link = self.links[self.random.choice(sorted(self.links))] if self.links else None
        if link is None:
            return
        moves = [self.compute]
        if link.down:
            moves += [self.obey] * 3
        if link.up:
            moves += [self.hear] * 3
        self.random.choice(moves)(link)

    def pass_a_moment(self) -> None:
        self.pass_time(self.random.choice((0.001, 0.05, 0.3)))

    def disturb(self) -> None:
        kind = self.random.choice(
            (
                "crash",
                "restart",
                "twice",
                "twice",
                "refuse",
                "fail",
                "drain",
                "cancel",
                "complete",
                "unsent",
                "heal",
            )
        )
        worker_id = self.random.choice(sorted(WORKERS))
        link = self.links.get(worker_id)
        self.faults[kind] += 1
        match kind:
            case "crash" if link is not None:
                self.crash(worker_id)
            case "restart" if link is None:
                self.start(worker_id)
            case "twice" if link is not None and link.up:
                self.hear(link, again=True)
            case "twice" if link is not None and link.down:
                self.obey(link, again=True)
            case "refuse" if link is not None:
                link.worker.refuse = "full"
            case "fail" if link is not None:
                link.worker.fail = self.random.choice(
                    (Code.DATA_LOSS, Code.INTERNAL, Code.UNAVAILABLE)
                )
            case "drain" if link is not None:
                link.worker.info = replace(link.worker.info, state="draining")
                self.carry_out(self.dispatcher.workers_changed([link.worker.info], self.now))
            case "unsent" if link is not None and link.up:
                link.up.pop()  # a worker with a bug
                self.crash(worker_id)
            case "cancel" | "complete" if self.records:
                self.leave(self.random.choice(self.records), kind)
            case "heal" if link is not None:
                self.heal(link)

    def leave(self, record: Record, kind: str) -> None:
        request_id = record.request.request_id
        if record.ends:
            return
        if kind == "cancel":
            record.cancelled = True
            self.carry_out(self.dispatcher.cancel(request_id, Cancelled("by the client"), self.now))
        else:
            record.completed = True
            self.carry_out(self.dispatcher.stop(request_id, self.now))

    def heal(self, link: Link) -> None:
        link.worker.refuse, link.worker.fail = "", None
        link.worker.info = replace(link.worker.info, state="ready")
        self.carry_out(self.dispatcher.workers_changed([link.worker.info], self.now))

    # Judgement

    def check(self) -> None:
        for record in self.records:
            assert len(record.ends) <= 1, "two ends"
        unfinished = sum(not record.ends for record in self.records)
        assert self.dispatcher.unfinished == unfinished
        assert self.dispatcher.running + self.dispatcher.waiting <= unfinished
        check_books(self.dispatcher)

    def run(self) -> Simulation:
        for _ in range(STEPS):
            self.step()
        for worker_id in WORKERS:
            if worker_id in self.links:
                self.heal(self.links[worker_id])
            else:
                self.start(worker_id)
        while self.dispatcher.unfinished:
            self.settle()
            self.pass_time(0.1)
            assert self.now < 1000, "a request never ends"
        self.settle()
        self.judge()
        return self

    def settle(self) -> None:
        """Everybody does what is to be done."""
        for _ in range(200):
            for link in self.links.values():
                while link.down:
                    self.obey(link)
                self.compute(link)
                while link.up:
                    self.hear(link)

    def judge(self) -> None:
        self.check()
        for link in self.links.values():
            assert not link.worker.sequences, f"{link.worker.info.worker_id} still holds a sequence"
            assert not link.worker.prompts, f"{link.worker.info.worker_id} still holds a prompt"
        assert self.dispatcher.running == self.dispatcher.waiting == 0
        for record in self.records:
            self.judge_record(record, record.ends[0])

    def judge_record(self, record: Record, end: End) -> None:
        request = record.request
        expected = answer(
            request.token_ids, request.sampling.seed or 0, request.sampling.max_tokens
        )
        assert record.tokens == expected[: len(record.tokens)], (
            "the answer depends on what happened to the workers"
        )
        error: KvRelayError | None = end.error
        match end.finish_reason:
            case "length":
                assert record.tokens == expected
            case "stop":
                assert record.completed
            case "cancelled":
                assert record.cancelled
        if isinstance(error, DeadlineExceeded):
            assert self.now >= request.deadline


def main() -> None:
    ends: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for seed in range(int(sys.argv[1])):
        try:
            simulation = Simulation(seed).run()
        except AssertionError:
            print(f"seed {seed}")
            raise
        ends.update(
            str(record.ends[0].error and record.ends[0].error.code.name)
            for record in simulation.records
        )
        faults.update(simulation.faults)
    print(dict(ends), dict(faults))


if __name__ == "__main__":
    main()
