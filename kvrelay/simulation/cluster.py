"""A simulated cluster: one router, its workers, and the messages between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.timeline import PoolSample, Sample
from kvrelay.planning.profile import Profile
from kvrelay.simulation.agenda import Agenda
from kvrelay.simulation.decode import SimulatedDecode
from kvrelay.simulation.decode_steps import MOST_STEPS
from kvrelay.simulation.machine import Machine
from kvrelay.simulation.prefill import SimulatedPrefill
from kvrelay.simulation.prompts import SharedHashes
from kvrelay.simulation.router import SimulatedRouter
from kvrelay.simulation.scenario import Scenario
from kvrelay.simulation.worker import SimulatedWorker, StepTime, Times
from kvrelay.types.workers import POOLS, PoolName, WorkerInfo, WorkerLoad
from kvrelay.worker_messages import Command, Event

# A worker's load reaches the router this often, in seconds.
HEARTBEAT_S = 0.5


class SimulatedCluster:
    """Owns the workers and carries messages. Messages of one direction stay in order."""

    def __init__(
        self,
        scenario: Scenario,
        agenda: Agenda,
        machine: Machine,
        done: Callable[[Row, bool], None],
        most_steps: int = MOST_STEPS,
    ) -> None:
        self.agenda = agenda
        self.machine = machine
        self.hashes = SharedHashes()
        self.config = scenario.config
        self.delays = scenario.delays
        self.scenario = scenario
        self.workers: dict[str, SimulatedWorker] = {}
        # Wanted sizes of the pools, for the timeline.
        self.desired: dict[PoolName, int] = {pool: len(scenario.pools[pool]) for pool in POOLS}
        self.router = SimulatedRouter(
            scenario.config,
            agenda,
            self.hashes,
            scenario.delays,
            scenario.most_tokens(),
            self._send,
            done,
            watch_latency=scenario.policy is not None,
        )
        # Worker-seconds of workers that are gone.
        self._gone_s = 0.0
        self._most_steps = most_steps
        self._numbers: Counter[PoolName] = Counter()
        self._infos: tuple[WorkerInfo, ...] = ()
        for pool in POOLS:
            for profile in scenario.pools[pool]:
                self.start(pool, profile)

    # Workers

    def next_name(self, pool: PoolName) -> str:
        """Returns the name of the pool's next worker. Numbers are never used again."""
        number = self._numbers[pool]
        self._numbers[pool] += 1
        return f"{pool}-{number}"

    def start(self, pool: PoolName, profile: Profile, name: str = "") -> SimulatedWorker:
        """Adds a worker that serves from now on."""
        name = name or self.next_name(pool)
        blocks = self.scenario.num_blocks(pool, profile)
        worker: SimulatedWorker
        if pool == "prefill":
            worker = SimulatedPrefill(name, 1, profile, blocks, self)
        else:
            worker = SimulatedDecode(name, 1, profile, blocks, self, self._most_steps)
        self.workers[name] = worker
        self.router.worker_found(worker.info())
        return worker

    def remove(self, worker_id: str, expected: bool) -> None:
        """Removes a worker, dead or stopped."""
        worker = self.workers.pop(worker_id)
        if isinstance(worker, SimulatedDecode) and (words := worker.last_words()) is not None:
            self.router.on_event(worker_id, *words, ())
        worker.alive = False
        worker.process.ends()
        self._gone_s += self.agenda.now - worker.started_at
        self.router.worker_lost(worker_id, expected)

    @property
    def worker_seconds(self) -> float:
        """Worker-seconds so far: what the cluster costs."""
        now = self.agenda.now
        return self._gone_s + sum(now - one.started_at for one in self.workers.values())

    def heartbeat(self) -> tuple[WorkerInfo, ...]:
        """Has all workers report their load to the router. Returns the reports."""
        self._infos = tuple(one.info() for one in self.workers.values())
        self.router.workers_changed(self._infos)
        return self._infos

    # Messages

    def _send(self, worker_id: str, command: Command) -> None:
        worker = self.workers.get(worker_id)
        if worker is not None:
            deliver = worker.while_alive(lambda: worker.handle(command))
            self.agenda.after(self.delays.message_s, deliver)

    def tell(
        self,
        worker: SimulatedWorker,
        event: Event,
        times: dict[str, Times],
        steps: Sequence[StepTime],
    ) -> None:
        """Sends an event of a worker to the router."""
        worker_id = worker.worker_id

        def deliver() -> None:
            if self.workers.get(worker_id) is worker:
                self.router.on_event(worker_id, event, times, steps)

        self.agenda.after(self.delays.message_s, deliver)

    def peer(self, worker_id: str) -> SimulatedWorker | None:
        """Returns a living worker, or None."""
        return self.workers.get(worker_id)

    # State

    def sample(self) -> Sample:
        """Returns the state for the timeline, by the last heartbeat."""
        dispatcher = self.router.dispatcher
        return Sample(
            at_s=self.agenda.now,
            running=dispatcher.running,
            waiting=dispatcher.waiting,
            pools={pool: self._pool_sample(pool) for pool in POOLS},
            waiting_for_prefill=dispatcher.waiting_for_prefill[0],
        )

    def _pool_sample(self, pool: PoolName) -> PoolSample:
        infos = [one for one in self._infos if one.pool == pool]
        loads: list[WorkerLoad] = [one.load for one in infos]
        ready = [one.load for one in infos if one.state == "ready"]
        blocks = max(1, sum(one.blocks_total for one in loads))
        return PoolSample(
            workers=len(ready),
            desired=self.desired[pool],
            running=sum(one.running for one in loads),
            waiting=sum(one.waiting for one in loads),
            waiting_tokens=sum(one.waiting_tokens for one in loads),
            kv_share=sum(one.blocks_held for one in loads) / blocks,
            tokens_per_second=sum(one.tokens_per_second for one in loads),
            busy_share=sum(one.busy_share for one in ready) / max(1, len(ready)),
            leased_share=sum(one.blocks_leased for one in loads) / blocks,
        )
