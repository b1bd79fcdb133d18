"""The simulated router: the production dispatcher in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.kvcache.block_hashes import BlockHasher
from kvrelay.errors import InvalidArgument, KvRelayError
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.workload import PlannedRequest
from kvrelay.percentiles import percentile
from kvrelay.simulation.agenda import Agenda
from kvrelay.simulation.measurement import Measurement
from kvrelay.simulation.prompts import SharedHashes
from kvrelay.simulation.scenario import Delays
from kvrelay.simulation.worker import StepTime, Times
from kvrelay.types.control_plane import RouterLoad
from kvrelay.types.requests import SamplingParams
from kvrelay.types.workers import WorkerInfo
from kvrelay.worker_messages import Command, Event, TokenBatch
from router.core.dispatcher import Dispatcher
from router.core.effects import Effect, Emit, End, Send
from router.core.request import Request

# Times between two ticks, and between two looks for a prefill worker that is about to need a
# prompt; as in `router.runtime.driver`.
TICK_S = 0.05
LOOK_S = 0.01
# Time window of the latencies that the autoscaler sees, in seconds.
WINDOW_S = 30.0


class SimulatedRouter:
    """Owns the dispatcher and the measurements of the requests."""

    def __init__(
        self,
        config: ClusterConfig,
        agenda: Agenda,
        hashes: SharedHashes,
        delays: Delays,
        most_tokens: int,
        send: Callable[[str, Command], None],
        done: Callable[[Row, bool], None],
        watch_latency: bool = False,
    ) -> None:
        """`send` delivers a command to a worker. `done` takes each complete row, and whether its
        token times were kept.

        - most_tokens: tokens of prompt and answer that a worker has room for.
        - watch_latency: whether `load` is asked for latencies.
        """

        def hasher_of(request: Request, block_size: int) -> BlockHasher:
            return hashes.get(request.request_id, block_size)

        self.dispatcher = Dispatcher(config, hasher_of=hasher_of)
        self._config = config
        self._agenda = agenda
        self._hashes = hashes
        self._delays = delays
        self._most_tokens = most_tokens
        self._send = send
        self._done = done
        self._open: dict[str, Measurement] = {}
        self._times: dict[str, Times] = {}
        self._tick_due = False
        self._looking = False
        self._watch_latency = watch_latency
        # (time, seconds) of first tokens and of gaps between tokens.
        self._ttft: deque[tuple[float, float]] = deque()
        self._itl: deque[tuple[float, float]] = deque()
        self.finished = self.failed = 0

    @property
    def unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self._open)

    # Requests

    def submit(self, index: int, planned: PlannedRequest, detailed: bool) -> None:
        """Submits a request. `detailed`: whether to keep the times of its tokens."""
        assert planned.token_ids is not None, "a simulated prompt has token ids"
        now, name = self._agenda.now, str(index)
        arrival = now - self._delays.request_s
        measurement = Measurement(index, planned.at, len(planned.token_ids), detailed)
        request = Request(
            request_id=name,
            token_ids=planned.token_ids,
            sampling=SamplingParams(
                max_tokens=planned.output_tokens,
                temperature=0.0,
                seed=planned.seed % 2**31,
                ignore_eos=True,
            ),
            arrival=arrival,
            deadline=now + self._config.router.default_deadline_s,
        )
        try:
            if request.most_tokens > self._most_tokens:
                raise InvalidArgument(
                    f"a prompt of {len(planned.token_ids)} tokens and an answer of "
                    f"{planned.output_tokens} do not fit; the most is {self._most_tokens} tokens"
                )
            self._open[name] = measurement
            measurement.life, effects = self.dispatcher.submit(request, now)
        except KvRelayError as error:
            self._open.pop(name, None)
            self._hashes.forget(name)
            self.failed += 1
            self._done(measurement.refused(error, now - planned.at), detailed)
            return
        self._carry_out(effects)
        self._keep_time()

    def cancel_all(self, error: KvRelayError) -> None:
        """Ends all requests with the error."""
        for name in list(self._open):
            self._carry_out(self.dispatcher.cancel(name, error, self._agenda.now))

    # Workers

    def worker_found(self, info: WorkerInfo) -> None:
        """Adds a worker that serves from now on."""
        self._carry_out(self.dispatcher.worker_found(info, self._agenda.now))

    def worker_lost(self, worker_id: str, expected: bool) -> None:
        """Removes a worker that is gone."""
        self._carry_out(self.dispatcher.worker_lost(worker_id, self._agenda.now, expected))
        self._keep_time()

    def workers_changed(self, infos: Iterable[WorkerInfo]) -> None:
        """Updates the loads of the workers."""
        self._carry_out(self.dispatcher.workers_changed(infos, self._agenda.now))
        self._keep_time()

    def on_event(
        self, worker_id: str, event: Event, times: dict[str, Times], steps: Sequence[StepTime]
    ) -> None:
        """Handles an event of a worker. `times`: of the tokens in it, by request. The times of a
        run of steps lie in the past. `steps`: the last steps of the run.
        """
        now = self._agenda.now
        if steps:
            for size, seconds in steps:
                self.dispatcher.stepped(worker_id, size, seconds, now)
            # The dispatcher measures a step as the time between two batches with the same first
            # sequence, which would be the whole run.
            self._carry_out(self.dispatcher.on_event(worker_id, TokenBatch(()), now))
        self._times = times
        self._carry_out(self.dispatcher.on_event(worker_id, event, now))
        self._times = {}
        self._keep_time()

    # Time

    def _keep_time(self) -> None:
        """Has the dispatcher tick while there are requests."""
        if not self._open:
            return
        if not self._tick_due:
            self._tick_due = True
            self._agenda.after(TICK_S, self._tick)
        if not self._looking and self.dispatcher.prompts_wait:
            self._looking = True
            self._agenda.after(LOOK_S, self._look)

    def _tick(self) -> None:
        self._tick_due = False
        self._carry_out(self.dispatcher.tick(self._agenda.now))
        self._keep_time()

    def _look(self) -> None:
        self._looking = False
        self._carry_out(self.dispatcher.pump(self._agenda.now))
        self._keep_time()

    def load(self) -> RouterLoad:
        """The load that the router reports to the autoscaler."""
        dispatcher = self.dispatcher
        for_prefill, prefill_tokens = dispatcher.waiting_for_prefill
        at_limit, limit_tokens = dispatcher.waiting_at_limit
        return RouterLoad(
            router_id="router-0",
            running=dispatcher.running,
            waiting=dispatcher.waiting,
            waiting_tokens=dispatcher.waiting_tokens,
            waiting_for_prefill=for_prefill,
            waiting_prefill_tokens=prefill_tokens,
            waiting_at_limit=at_limit,
            waiting_tokens_at_limit=limit_tokens,
            finished=self.finished,
            failed=self.failed,
            ttft_p95_ms=self._p95_ms(self._ttft),
            itl_p95_ms=self._p95_ms(self._itl),
            begun=dispatcher.recent.begun,
            recent=dispatcher.recent.sample(self._agenda.now),
        )

    def _p95_ms(self, events: deque[tuple[float, float]]) -> float | None:
        while events and events[0][0] < self._agenda.now - WINDOW_S:
            events.popleft()
        values = sorted(seconds for _, seconds in events)
        return 1000 * percentile(values, 95) if values else None

    # Effects

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Emit(request_id, _, token_ids):
                    self._emit(request_id, len(token_ids))
                case Send(worker_id, command):
                    self._send(worker_id, command)
                case End(request_id):
                    self._end(request_id, effect)

    def _emit(self, request_id: str, count: int) -> None:
        measurement, now = self._open[request_id], self._agenda.now
        ends = self._times.get(request_id)
        before = measurement.last_s
        if ends is None:
            times = [now]
        else:
            # The times of the worker's steps, plus the way to the router. A token that the router
            # has already is first in the event and not in `count`.
            times = (ends[len(ends) - count :] + self._delays.message_s).tolist()
        measurement.tokens(times)
        if self._watch_latency:
            if before is None:
                self._ttft.append((now, times[0] - measurement.scheduled_s))
            else:
                # One value for each event bounds their number.
                self._itl.append((now, (times[-1] - before) / count))

    def _end(self, request_id: str, end: End) -> None:
        measurement = self._open.pop(request_id)
        self._hashes.forget(request_id)
        row = measurement.row(end, self._agenda.now, self._delays.message_s)
        if row.ok:
            self.finished += 1
        else:
            self.failed += 1
        self._done(row, measurement.detailed)
