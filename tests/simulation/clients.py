"""Clients of a simulated router: they ask, read, leave, and come back with the tokens that they
have.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from simulation.cluster import Cluster, RouterMember
from simulation.collisions import IDENTITIES, Beginning, Identity
from simulation.history import End, Part, Plan, Record
from simulation.toy_engine import EOS, POISON

from kvrelay.errors import KvRelayError
from kvrelay.types.requests import FinishReason, SamplingParams
from kvrelay.types.workers import ModelVersion
from router.core.lifecycle import Lifecycle
from router.core.request import Request
from router.runtime.stream_reader import StreamReader

STATES = ("queued", "reserving", "prefilling", "handing_off", "decoding", "finishing")


def plan_requests(
    rng: random.Random, count: int, poison: bool, beginnings: Sequence[Beginning]
) -> list[Plan]:
    """Arrivals come in bursts; prompts share beginnings; some clients are impatient, slow, or
    leave.
    """
    plans, at = [], 0.0
    for number in range(count):
        at += rng.choice((0.0, 0.0, 0.005, 0.05, 0.5, 1.0))
        own = tuple(rng.randrange(1, POISON) for _ in range(rng.randint(1, 14)))
        begin = (
            rng.choice(beginnings) if rng.random() < 0.6 else Beginning(rng.choice(IDENTITIES), ())
        )
        prompt = begin.tokens + own
        poisoned = poison and number == count // 2
        if poisoned:
            prompt += (POISON,)
        cancel_in = rng.choice(STATES) if rng.random() < 0.2 and not poisoned else ""
        # Only a short answer can be complete before its hand-off is reported.
        max_tokens = 2 if cancel_in == "finishing" else rng.choice((1, 2, 5, 12, 24, 40))
        plans.append(
            Plan(
                request_id=f"r{number}",
                at=at,
                prompt=prompt,
                sampling=SamplingParams(
                    max_tokens=max_tokens, seed=rng.randrange(100), ignore_eos=rng.random() < 0.5
                ),
                timeout=rng.choice((0.3, 1.0, 3.0, 12.0, 20.0, 20.0, 20.0, 20.0)),
                priority=int(rng.random() < 0.2),
                tenant=begin.identity.tenant,
                cache_salt=begin.identity.cache_salt,
                stop_token=rng.randrange(1, POISON) if rng.random() < 0.15 else None,
                cancel_in=cancel_in,
                read_pause=0.3 if rng.random() < 0.1 else 0.0,
                poison=poisoned,
            )
        )
    return plans


@dataclass
class Sink:
    """router.runtime.stream.TokenSink without text: one token is the stop string."""

    stop_token: int | None
    stopped: bool = False
    stop_string: str | None = None

    def push(self, token_id: int) -> str:
        self.stopped = self.stopped or token_id == self.stop_token
        return ""

    def finish(self) -> str:
        return ""


@dataclass
class Client:
    cluster: Cluster
    plan: Plan
    record: Record = field(init=False)
    news: asyncio.Event = field(default_factory=asyncio.Event)  # an end, or the death of the router

    def __post_init__(self) -> None:
        self.record = Record(self.plan)

    async def run(self) -> None:
        """Until the answer has ended, at one router or at its successors."""
        loop = self.cluster.loop
        await asyncio.sleep(self.plan.at - loop.time())
        while not self.record.ends:
            router = self.cluster.router
            if router is None or not router.process.alive:
                await asyncio.sleep(0.05)
                continue
            self.news.clear()
            self.record.routers += 1
            router.process.spawn(self._ask(router))
            while not self.record.ends and router.process.alive:
                self.news.clear()
                await self.news.wait()

    async def _ask(self, router: RouterMember) -> None:
        """As router.frontend.frontend and router.api.grpc.service do: in the router's process."""
        plan, record, process = self.plan, self.record, router.process
        resume = record.tokens
        sink = Sink(plan.stop_token, stopped=plan.stop_token in resume)
        request = Request(
            request_id=plan.request_id,
            token_ids=plan.prompt,
            sampling=plan.sampling,
            arrival=process.now(),
            deadline=process.now() + plan.deadline - self.cluster.loop.time(),
            priority=plan.priority,
            resume=resume,
            complete=self._complete(resume),
            tenant=Identity(plan.tenant).owner,
            cache_salt=plan.cache_salt,
            model=ModelVersion.from_fingerprint(record.fingerprint) if record.fingerprint else None,
        )
        try:
            stream = router.driver.submit(request, sink)
        except KvRelayError as error:
            self._end(error.code.name, error.message)
            return
        if plan.cancel_in:
            self._watch(router, stream.life)
        try:
            async for _, response in StreamReader([stream]).responses():
                record.fingerprint = response.system_fingerprint or record.fingerprint
                if response.token_ids:
                    record.parts.append(
                        Part(self.cluster.loop.time(), response.index, response.token_ids)
                    )
                    self._say(f"tokens {response.index} {response.token_ids}")
                if response.finish_reason is not None:
                    self._attempts(stream)
                    self._end(response.finish_reason)
                elif plan.read_pause:
                    await asyncio.sleep(plan.read_pause)
        except KvRelayError as error:
            self._attempts(stream)
            self._end(error.code.name, error.message)

    def _complete(self, resume: tuple[int, ...]) -> FinishReason | None:
        if not resume:
            return None
        if self.plan.stop_token in resume or (
            resume[-1] == EOS and not self.plan.sampling.ignore_eos
        ):
            return "stop"
        return "length" if len(resume) >= self.plan.sampling.max_tokens else None

    def _watch(self, router: RouterMember, life: Lifecycle) -> None:
        """The client leaves as soon as the request is in a certain state, however short."""

        def seen() -> None:
            if life.state == self.plan.cancel_in and not self.record.left_in:
                self.record.left_in = life.state
                self.cluster.network.faults[f"client left while {life.state}"] += 1
                self._say(f"leaves while {life.state}")
                router.driver.cancel(self.plan.request_id)

        class Watched(Lifecycle):
            def __setattr__(self, name: str, value: object) -> None:
                super().__setattr__(name, value)
                if name == "state":
                    router.process.soon(0, seen)

        life.__class__ = Watched
        router.process.soon(0, seen)

    def _attempts(self, stream: object) -> None:
        attempts = stream.life.attempts  # type: ignore[attr-defined]
        self.record.attempts = tuple(
            f"{one.prefill_worker}>{one.decode_worker}: {one.outcome}" for one in attempts
        )

    def _end(self, outcome: str, message: str = "") -> None:
        self.record.ends.append(End(self.cluster.loop.time(), outcome, message))
        self._say(f"ends {outcome} {message}")
        self.news.set()

    def _say(self, text: str) -> None:
        self.cluster.network.say(f"client {self.plan.request_id} {text}")
