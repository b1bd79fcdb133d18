"""A dispatcher and fake workers in virtual time, all of them well: each step of a worker takes the
same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from support.fake_worker import FakeWorker, Key, answer, worker_info

from kvrelay.config.schema import ClusterConfig
from kvrelay.errors import Cancelled, KvRelayError
from kvrelay.types.requests import PrefillTimings
from kvrelay.types.workers import PoolName
from kvrelay.worker_messages import Command, Event, SequenceTokens, TokenBatch
from router.core.dispatcher import Dispatcher
from router.core.effects import Effect, Emit, End, Notice, Send
from router.core.request import Request

STEP_S = 0.05


@dataclass
class Record:
    """What the client of one request saw."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    end: End | None = None
    ended_at: float = 0.0
    token_at: list[float] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Finished, with the right tokens."""
        sampling = self.request.sampling
        expected = answer(self.request.token_ids, sampling.seed or 0, sampling.max_tokens)
        return (
            self.end is not None and self.end.finish_reason == "length" and self.tokens == expected
        )


class VirtualCluster:
    """Each step passes STEP_S seconds, in which every worker obeys, computes a step and is heard.

    `poisonous` says whether a worker dies now of a sequence that it runs: its id, the request's and
    how many tokens the attempt has given. A worker that died comes back `restart_s` later.
    """

    def __init__(
        self,
        prefill: int,
        decode: int,
        slots: int = 8,
        slo: dict[str, float] | None = None,
        **router: object,
    ) -> None:
        config = {
            "router": {"local_below_tokens": 8} | router,
            "decode": {"max_batch": slots},
            "slo": slo,
        }
        self.dispatcher = Dispatcher(ClusterConfig.model_validate(config))
        self.now = 0.0
        self.slots = slots
        self.workers: dict[str, FakeWorker] = {}
        self.records: dict[str, Record] = {}
        self.refused: dict[str, KvRelayError] = {}
        self.notices: list[Notice] = []
        self.deaths: list[str] = []
        self.slow: dict[str, int] = {}  # worker: computes a step only every so many
        # Prefill and decode workers that do not reach each other
        self.cut: set[tuple[str, str]] = set()
        # What a prefill worker says that a prompt took, instead of 40 ms
        self.compute_s: dict[str, float] = {}
        # Prompt tokens that a prefill worker computes in a step; all that it has if None
        self.prefill_tokens: int | None = None
        self._computed: Counter[tuple[str, Key]] = Counter()
        self.poisonous: Callable[[str, str, int], bool] = lambda _worker, _request, _tokens: False
        self.restart_s = 1.0
        self._starts: dict[str, tuple[PoolName, float]] = {}
        self._epochs = 0
        self._steps = 0
        self._down: dict[str, list[Command]] = {}
        pools: list[tuple[PoolName, int]] = [("prefill", prefill), ("decode", decode)]
        for pool, number in pools:
            for one in range(number):
                self.start(f"{pool[0]}{one}", pool)

    def start(self, worker_id: str, pool: PoolName) -> None:
        self._epochs += 1
        info = replace(worker_info(worker_id, pool, epoch=self._epochs), block_size=16)
        self.workers[worker_id] = FakeWorker(info, slots=self.slots)
        self._down[worker_id] = []
        self._carry_out(self.dispatcher.worker_found(info, self.now))

    def kill(self, worker_id: str, expected: bool = False) -> None:
        pool = self.workers.pop(worker_id).info.pool
        self.deaths.append(worker_id)
        self._starts[worker_id] = pool, self.now + self.restart_s
        self._carry_out(self.dispatcher.worker_lost(worker_id, self.now, expected))

    def _tell_rates(self) -> None:
        """Prefill workers report what they compute, if that is limited."""
        rate = None if self.prefill_tokens is None else self.prefill_tokens / STEP_S
        changed = []
        for worker in self.workers.values():
            if worker.info.pool == "prefill" and worker.info.load.prompt_tokens_per_second != rate:
                load = replace(worker.info.load, prompt_tokens_per_second=rate)
                worker.info = replace(worker.info, load=load)
                changed.append(worker.info)
        if changed:
            self._carry_out(self.dispatcher.workers_changed(changed, self.now))

    def submit(self, request: Request) -> None:
        self.records[request.request_id] = Record(request)
        try:
            self._carry_out(self.dispatcher.submit(request, self.now)[1])
        except KvRelayError as error:
            self.refused[request.request_id] = error

    def cancel(self, request_id: str) -> None:
        self._carry_out(self.dispatcher.cancel(request_id, Cancelled("by the client"), self.now))

    def step(self) -> None:
        self.now += STEP_S
        self._steps += 1
        for worker_id, (pool, at) in list(self._starts.items()):
            if self.now >= at:
                del self._starts[worker_id]
                self.start(worker_id, pool)
        self._tell_rates()
        for worker_id, worker in list(self.workers.items()):
            commands, self._down[worker_id] = self._down[worker_id], []
            for command in commands:
                for event in worker.handle(command):
                    self.hear(worker_id, event)
        for worker_id in list(self.workers):
            if self._dies(worker_id):
                self.kill(worker_id)
            elif self._steps % self.slow.get(worker_id, 1) == 0:
                self._compute(worker_id)
        self._carry_out(self.dispatcher.tick(self.now))

    def hear(self, worker_id: str, event: Event) -> None:
        self._carry_out(self.dispatcher.on_event(worker_id, event, self.now))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.step()

    def settle(self) -> None:
        """Until no request is left."""
        while self.dispatcher.unfinished:
            self.step()
            assert self.now < 10_000, "a request never ends"

    def _dies(self, worker_id: str) -> bool:
        worker = self.workers[worker_id]
        given = [
            (one.spec.request_id, len(one.token_ids) - len(one.spec.token_ids))
            for one in worker.sequences.values()
            if one.committed
        ]
        given += [(prompt.spec.request_id, 0) for prompt in worker.prompts.values()]
        return any(self.poisonous(worker_id, request_id, tokens) for request_id, tokens in given)

    def _compute(self, worker_id: str) -> None:
        worker = self.workers[worker_id]
        for event in worker.step():
            self.hear(worker_id, event)
        room = self.prefill_tokens
        for key, prompt in list(worker.prompts.items()):
            if room is not None:
                left = len(prompt.spec.token_ids) - self._computed[worker_id, key]
                self._computed[worker_id, key] += min(room, left)
                if room < left:
                    break
                room -= left
                del self._computed[worker_id, key]
            target = prompt.target.worker_id
            peer = None if (worker_id, target) in self.cut else self.workers.get(target)
            for event in worker.prefill(key, peer):
                self.hear(worker_id, self._timed(worker_id, event))

    def _timed(self, worker_id: str, event: Event) -> Event:
        """A prefill worker's tokens, with the time that they took."""
        if not isinstance(event, TokenBatch):
            return event
        return TokenBatch(
            tuple(
                replace(one, prefill=PrefillTimings(0.0, self._seconds(worker_id, one), 0, 1))
                for one in event.sequences
            )
        )

    def _seconds(self, worker_id: str, first: SequenceTokens) -> float:
        if self.prefill_tokens is None:
            return self.compute_s.get(worker_id, 0.04)
        prompt = self.records[first.request_id].request.token_ids
        return STEP_S * (len(prompt) + first.index) / self.prefill_tokens

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(worker_id, command):
                    if worker_id in self.workers:
                        self._down[worker_id].append(command)
                case Emit(request_id, index, token_ids):
                    record = self.records[request_id]
                    assert record.end is None, "a token after the end"
                    assert index == len(record.tokens), "a token is lost or doubled"
                    record.tokens += token_ids
                    record.token_at += [self.now] * len(token_ids)
                case End(request_id):
                    record = self.records[request_id]
                    assert record.end is None, "two ends"
                    record.end, record.ended_at = effect, self.now
                case Notice():
                    self.notices.append(effect)
