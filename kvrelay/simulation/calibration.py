"""What a cluster adds to the steps of its workers, from a recorded load test of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.sweep_report import Report
from kvrelay.planning.least_squares import Floats, nonnegative_least_squares
from kvrelay.planning.step_cost_model import StepCostModel
from kvrelay.simulation.scenario import Delays, StepTimes, as_profiled
from kvrelay.types.requests import Ledger
from kvrelay.types.workers import POOLS, PoolName

# Fewest requests, and fewest steps of a kind.
_LEAST = 10
_QUANTILES = 201
# The slowdown beside another worker is known if some step spent more than this share of its time
# beside one.
_SEEN = 0.5
# Largest time in a report, in seconds. Larger ones are mistakes.
_MOST_S = 1e6
_MOST_TOKENS = 2**30
# Largest share of requests without a ledger or with several attempts. They kept workers busy too,
# and a report does not say when.
_MOST_SKIPPED = 0.05
# Times of the median above which a step is a stall of the machine.
_STALL = 20.0
# Range of measured / profiled time. Outside of it, the test and the profile do not belong together.
_POSSIBLE = (0.5, 20.0)
# Most requests that are read: the first ones.
_MOST_ROWS = 5_000
# Most workers of a pool whose steps are read. Each is compared with all others.
_MOST_WORKERS = 32


@dataclass(frozen=True, slots=True)
class Calibration:
    """Delays and step times of a cluster."""

    delays: Delays = field(default_factory=Delays)
    # By the pool whose steps they are.
    times: Mapping[PoolName, StepTimes] = field(default_factory=as_profiled)
    # What was found and what is missing, in sentences for people.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Answer:
    """When a request computed, in seconds of the test."""

    row: Row
    ledger: Ledger
    prefill_worker: str
    # Empty if the first token was the only one.
    decode_worker: str
    prefill_from: float
    prefill_until: float
    # When each token arrived.
    times: Floats

    @classmethod
    def of(cls, row: Row, ledger: Ledger, ttft_s: float) -> _Answer:
        """Reads a request of one attempt."""
        phases, attempt = dict(ledger.phases), ledger.attempts[0]
        called = row.scheduled_s + row.late_s
        # The way to the router, and back.
        way_s = max(0.0, ttft_s - row.late_s - ledger.ttft_seconds)
        waited = ("tokenize", "queue", "reserve", "prefill_queue")
        begun = called + way_s / 2 + sum(phases.get(name, 0.0) for name in waited)
        first = row.scheduled_s + ttft_s
        return cls(
            row,
            ledger,
            attempt.prefill_worker or attempt.decode_worker,
            attempt.decode_worker,
            begun,
            begun + phases.get("prefill", 0.0),
            first + np.cumsum([0.0, *row.itl_s]),
        )


class _Busy:
    """How long some workers computed, up to any time."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        begins: list[float] = []
        ends: list[float] = []
        for begin, end in sorted(intervals):
            if ends and begin <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                begins.append(begin)
                ends.append(end)
        self._times = np.array([x for pair in zip(begins, ends, strict=True) for x in pair])
        lengths = np.subtract(ends, begins)
        self._sums = np.repeat(np.concatenate(([0.0], np.cumsum(lengths))), 2)[1:-1]

    def share(self, begin: Floats, end: Floats) -> Floats:
        """Returns the busy share of each span of time."""
        if not len(self._times):
            return np.zeros_like(begin)
        busy = np.interp(end, self._times, self._sums) - np.interp(begin, self._times, self._sums)
        shares: Floats = busy / np.maximum(end - begin, 1e-9)
        return shares


def calibrate(
    tests: Mapping[str, Report],
    costs: StepCostModel,
    chunk_tokens: int,
    cores: int | None = None,
) -> Calibration:
    """Compares recorded load tests of clusters with the profile of their workers.

    Raises InvalidArgument for a test that tells too little, or that cannot be of this profile.

    - tests: the report of each, by name.
    - chunk_tokens: of the prefill workers.
    - cores: of the machine that the simulated workers share.
    """
    found, notes = [], []
    for name, report in tests.items():
        answers = _read(name, report)
        found.append(answers)
        workers = {
            worker
            for one in answers
            for worker in (one.prefill_worker, one.decode_worker)
            if worker
        }
        if cores is not None and len(workers) > cores:
            notes.append(
                f"{name:.200}: {len(workers)} workers were recorded; if more than {cores} computed "
                "at the same time, their slowdown counts twice"
            )
    steps: dict[PoolName, _Steps] = {
        "prefill": _together([_prompts(one, costs, chunk_tokens) for one in found]),
        "decode": _together([_gaps(one, costs) for one in found]),
    }
    times: dict[PoolName, StepTimes] = {}
    for pool, measured in steps.items():
        if len(measured.measured) < _LEAST:
            times[pool] = StepTimes()
            notes.append(f"{pool} steps take the profile's times: {_MISSING[pool]}")
            continue
        times[pool] = _times(measured)
        notes.append(_told(pool, times[pool]))
        low, high = _POSSIBLE
        if not low <= times[pool].alone <= high:
            raise InvalidArgument(
                f"{pool} steps took {times[pool].alone:.3g} times the profile; the load test and "
                "the profile are of different models, machines or settings"
            )
    delays = _delays([one for answers in found for one in answers], costs, chunk_tokens)
    return Calibration(delays, times, tuple(notes))


_MISSING: dict[PoolName, str] = {
    "prefill": f"fewer than {_LEAST} prompts were computed one at a time by a prefill worker",
    "decode": f"fewer than {_LEAST} gaps between tokens show a step",
}


def _told(pool: PoolName, times: StepTimes) -> str:
    beside = times.beside
    return (
        f"{pool} steps take {times.alone:.2f} times the profile alone, {beside['prefill']:.2f} "
        f"times that beside prompts and {beside['decode']:.2f} times beside answers"
    )


def _read(name: str, report: Report) -> list[_Answer]:
    if report.row_every != 1:
        raise InvalidArgument(
            f"{name:.200}: the report has one of {report.row_every} requests; a calibration needs "
            "all of them"
        )
    rows = report.rows[:_MOST_ROWS]
    answers = list(_answers(rows))
    if len(answers) < _LEAST:
        raise InvalidArgument(
            f"{name:.200}: {len(answers)} answers have a ledger, one attempt and possible times; a "
            f"calibration needs {_LEAST} of them"
        )
    total = len(rows) + max(0, report.in_flight)
    skipped = total - len(answers)
    if skipped > _MOST_SKIPPED * total:
        raise InvalidArgument(
            f"{name:.200}: {skipped} of {total} requests failed, took several attempts, or have no "
            f"ledger or impossible times; at most {_MOST_SKIPPED:.0%} may, because they kept "
            "workers busy too"
        )
    return answers


def _answers(rows: Iterable[Row]) -> Iterator[_Answer]:
    for row in rows:
        ledger = row.ledger
        if not row.ok or ledger is None or row.ttft_s is None:
            continue
        seconds = (row.scheduled_s, row.late_s, row.ttft_s, ledger.ttft_seconds, *row.itl_s)
        phases = (value for _, value in ledger.phases)
        plain = all(0 <= one <= _MOST_S for one in (*seconds, *phases))
        if plain and len(ledger.attempts) == 1 and row.prompt_tokens <= _MOST_TOKENS:
            yield _Answer.of(row, ledger, row.ttft_s)


def _delays(answers: Sequence[_Answer], costs: StepCostModel, chunk_tokens: int) -> Delays:
    """Returns medians."""
    messages, requests, handoffs = [], [], []
    for one in answers:
        phases = dict(one.ledger.phases)
        # Two messages each.
        messages += [phases[name] / 2 for name in ("reserve", "return") if phases.get(name)]
        assert one.row.ttft_s is not None, "it has tokens"
        # Latencies count from the scheduled arrival, and a client calls a little later.
        way_s = one.row.ttft_s - one.ledger.ttft_seconds
        requests.append(way_s + phases.get("tokenize", 0.0))
        if one.ledger.handoff is not None:
            # The blocks of the last chunk travel after the prompt is computed.
            tokens = max(1, one.row.prompt_tokens - one.row.cached_tokens)
            last = ((tokens - 1) % chunk_tokens + 1) / tokens * one.ledger.handoff.bytes
            handoffs.append(one.ledger.handoff.exposed_seconds - costs.handoff_s(last))
    message_s = max(0.0, median(messages)) if messages else Delays().message_s
    return Delays(
        request_s=max(0.0, median(requests) - message_s),
        message_s=message_s,
        handoff_s=max(0.0, median(handoffs)) if handoffs else 0.0,
    )


@dataclass(frozen=True, slots=True)
class _Steps:
    """Seconds of steps, measured and by the profile, and the shares of these times in which another
    worker computed prompts or answers.
    """

    measured: Floats
    expected: Floats
    prompts: Floats
    answers: Floats

    def chosen(self, kept: NDArray[np.bool_]) -> _Steps:
        """Returns the steps that are kept."""
        return _Steps(
            self.measured[kept], self.expected[kept], self.prompts[kept], self.answers[kept]
        )


def _times(steps: _Steps) -> StepTimes:
    """Fits measured / expected = alone + more_p x prompts + more_a x answers by least squares. What
    the fit leaves is noise.
    """
    ratios = steps.measured / steps.expected
    steps = steps.chosen(ratios <= _STALL * np.median(ratios))
    weights = np.sqrt(steps.expected)
    columns = np.stack((np.ones_like(weights), steps.prompts, steps.answers), axis=1)
    ratios = steps.measured / steps.expected
    factors = nonnegative_least_squares(columns * weights[:, None], ratios * weights, [0])
    fitted = columns @ factors
    noise = _quantiles(ratios / fitted, steps.expected * fitted)
    mean = sum(noise) / len(noise)
    alone = float(factors[0])
    slower = {
        kind: 1 + float(factors[column]) / alone
        for column, kind in enumerate(POOLS, 1)
        if columns[:, column].max() > _SEEN
    }
    # A neighbour that no test has shown gets the largest slowdown that a test has shown.
    unseen = max(slower.values(), default=1.0)
    return StepTimes(
        alone,
        {kind: slower.get(kind, unseen) for kind in POOLS},
        tuple(one / mean for one in noise),
    )


def _quantiles(ratios: Floats, weights: Floats) -> tuple[float, ...]:
    """Returns equally likely quantiles. Each step is weighted by its duration, so the mean is over
    time, not over steps.
    """
    order = np.argsort(ratios)
    below = np.cumsum(weights[order]) - weights[order] / 2
    at = (np.arange(_QUANTILES) + 0.5) / _QUANTILES * weights.sum()
    found: list[float] = np.interp(at, below, ratios[order]).tolist()
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Others:
    """When workers other than one computed prompts, and when only answers."""

    prompts: _Busy
    all: _Busy

    @classmethod
    def of(cls, answers: Sequence[_Answer], worker: str) -> _Others:
        prompts = [
            (one.prefill_from, one.prefill_until) for one in answers if one.prefill_worker != worker
        ]
        decoding = [(one.times[0], one.times[-1]) for one in answers if one.decode_worker != worker]
        return cls(_Busy(prompts), _Busy([*prompts, *decoding]))

    def steps(self, begin: Floats, end: Floats, expected: Floats) -> _Steps:
        """Returns steps between these times."""
        prompts = self.prompts.share(begin, end)
        return _Steps(end - begin, expected, prompts, self.all.share(begin, end) - prompts)


def _together(found: Sequence[_Steps]) -> _Steps:
    if not found:
        return _Steps(*[np.empty(0)] * 4)
    return _Steps(
        np.concatenate([one.measured for one in found]),
        np.concatenate([one.expected for one in found]),
        np.concatenate([one.prompts for one in found]),
        np.concatenate([one.answers for one in found]),
    )


def _prompts(answers: Sequence[_Answer], costs: StepCostModel, chunk_tokens: int) -> _Steps:
    """Returns prompts that prefill workers computed one at a time."""
    found = []
    decode_workers = {one.decode_worker for one in answers}
    workers = {one.prefill_worker for one in answers} - decode_workers
    for worker in sorted(workers)[:_MOST_WORKERS]:
        mine = sorted(
            (one for one in answers if one.prefill_worker == worker),
            key=lambda one: one.prefill_from,
        )
        begin = np.array([one.prefill_from for one in mine])
        end = np.array([one.prefill_until for one in mine])
        expected = np.array(
            [
                costs.prompt_s(
                    one.row.prompt_tokens - one.row.cached_tokens,
                    chunk_tokens,
                    one.row.cached_tokens,
                )
                for one in mine
            ]
        )
        after = np.append(begin[1:], np.inf)
        before = np.maximum.accumulate(np.append(-np.inf, end[:-1]))
        fetched = np.array([one.ledger.fetch is not None for one in mine])
        kept = (begin >= before) & (after >= end) & (end > begin) & (expected > 0) & ~fetched
        found.append(_Others.of(answers, worker).steps(begin[kept], end[kept], expected[kept]))
    return _together(found)


def _gaps(answers: Sequence[_Answer], costs: StepCostModel) -> _Steps:
    """Returns decode steps without prompts, as the gaps between tokens show them."""
    found = []
    for worker in sorted({one.decode_worker for one in answers} - {""})[:_MOST_WORKERS]:
        mine = [one for one in answers if one.decode_worker == worker]
        batches = _Batches(mine)
        local = _Busy(
            (one.prefill_from, one.prefill_until) for one in mine if one.prefill_worker == worker
        )
        # The first gap of a sequence contains the hand-off. A response with several tokens took
        # several steps.
        single = [one for one in mine if len(one.times) == one.row.output_tokens]
        if not single:
            continue
        begin = np.concatenate([one.times[1:-1] for one in single])
        end = np.concatenate([one.times[2:] for one in single])
        batch, context = batches.at((begin + end) / 2)
        batches_s = map(costs.decode_s, batch.tolist(), context.tolist())
        expected = np.fromiter(batches_s, np.float64, len(batch))
        alone = local.share(begin, end) == 0
        kept = alone & (batch > 0) & (end > begin) & (expected > 0)
        found.append(_Others.of(answers, worker).steps(begin[kept], end[kept], expected[kept]))
    return _together(found)


class _Batches:
    """Sequences and tokens of a decode worker's batch at any time."""

    def __init__(self, answers: Sequence[_Answer]) -> None:
        self._first = np.sort([one.times[0] for one in answers])
        self._last = np.sort([one.times[-1] for one in answers])
        # The context grows by the tokens of a sequence, and falls by all of them at its end.
        at = np.concatenate([np.append(one.times, one.times[-1]) for one in answers])
        tokens = np.concatenate([self._changes(one) for one in answers])
        order = np.argsort(at, kind="stable")
        self._at = at[order]
        self._context = np.cumsum(tokens[order])

    @staticmethod
    def _changes(one: _Answer) -> Floats:
        prompt, more = one.row.prompt_tokens, len(one.times) - 1
        return np.array([prompt, *[1] * more, -prompt - more], dtype=np.float64)

    def at(self, when: Floats) -> tuple[NDArray[np.int64], Floats]:
        """Returns the sequences, and the tokens of all of them together."""
        batch = np.searchsorted(self._first, when) - np.searchsorted(self._last, when)
        return batch, self._context[np.searchsorted(self._at, when) - 1]
