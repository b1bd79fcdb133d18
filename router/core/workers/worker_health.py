"""Which workers are fit for new work: circuit breaking, and ejection of slow ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from kvrelay.types import POOLS, PoolName
from router.core.workers.circuit_breaker import Breaker
from router.core.workers.latency_outliers import Speed, times_slower

FAILURES = 3  # one after the other open a worker's breaker
OPEN_S = (1.0, 60.0)
EJECT_S = (5.0, 300.0)
JUDGE_S = 1.0  # how often speeds are compared
SAMPLES: dict[PoolName, int] = {"decode": 16, "prefill": 5}  # that a worker's speed is judged by
PROBE_SAMPLES: dict[PoolName, int] = {"decode": 8, "prefill": 1}
MOST = 256  # workers remembered that are gone

Cause = Literal["failing", "slow"]


@dataclass(frozen=True, slots=True)
class Sickness:
    """Why a worker gets no new work, for those who look."""

    worker_id: str
    pool: PoolName
    cause: Cause
    reason: str


@dataclass(slots=True, eq=False)
class _Patient:
    pool: PoolName
    present: bool = True
    failures: int = 0
    failed_at: float = float("-inf")
    failing: Breaker = field(default_factory=lambda: Breaker(*OPEN_S))
    slow: Breaker = field(default_factory=lambda: Breaker(*EJECT_S))
    speed: Speed = field(default_factory=Speed)
    probed: bool = False  # since it was ejected


class Health:
    """What this router has seen of each worker.

    *Failures*: FAILURES attempts in a row that the worker failed, each begun after the last had
    failed (a step that fails takes its whole batch along, and counts once). Losing the worker with
    requests on it is a failure like others and is remembered under its id: a worker that dies again
    and again is broken, too. A token or a hand-off is a success.

    *Slowness*: time for a decode step, or for a prompt, against the median of the pool's others
    (`router.core.workers.latency_outliers`). At most half of a pool, rounded down, is ejected at
    one time, so never its last worker; and a cluster in which all got slower ejects nobody.
    """

    def __init__(self) -> None:
        self._patients: dict[str, _Patient] = {}
        self._judged_at = 0.0

    def found(self, worker_id: str, pool: PoolName) -> None:
        patient = self._patients.get(worker_id)
        if patient is None or patient.pool != pool:
            patient = self._patients[worker_id] = _Patient(pool)
        patient.present = True
        patient.speed.clear()

    def lost(self, worker_id: str) -> None:
        self._patients[worker_id].present = False
        gone = [one for one, patient in self._patients.items() if not patient.present]
        if len(gone) > MOST:
            del self._patients[gone[0]]

    def fit(self, worker_id: str, now: float) -> bool:
        patient = self._patients[worker_id]
        return patient.failing.passes(now) and patient.slow.passes(now)

    def placed(self, worker_id: str, now: float) -> None:
        patient = self._patients[worker_id]
        patient.failing.passed(now)
        patient.slow.passed(now)
        if patient.slow.reason and not patient.probed:
            patient.probed = True
            patient.speed.clear()  # what it did before says nothing of now

    def troubled(self, worker_id: str) -> bool:
        """Whether a success of it would change anything."""
        return self._patients[worker_id].failures > 0

    def succeeded(self, worker_id: str, begun: float, now: float) -> str:
        """An attempt that began at `begun` did. Returns what came of that, if something did."""
        patient = self._patients[worker_id]
        if begun <= patient.failed_at:
            return ""  # it says nothing of what fails now
        patient.failures = 0
        if not patient.failing.reason:
            return ""
        patient.failing.close(now)
        return "gets new work again, since a probe went well"

    def failed(self, worker_id: str, begun: float, reason: str, now: float) -> str:
        """An attempt that began at `begun` failed on it. Returns what came of that, if something
        did.
        """
        patient = self._patients.get(worker_id)
        if patient is None or begun <= patient.failed_at:
            return ""
        patient.failed_at = now
        patient.failures += 1
        if patient.failures < FAILURES:
            return ""
        seconds = patient.failing.open(reason, now)
        return (
            f"gets no new work for {seconds:g} s after {patient.failures} failures in a row: "
            f"{reason}"
        )

    def worked(self, worker_id: str, size: int, seconds: float, now: float) -> None:
        """A piece of work took so long: a decode step of `size` sequences, or a prompt of `size`
        tokens.
        """
        self._patients[worker_id].speed.add(now, size, seconds)

    def judge(self, now: float) -> list[tuple[str, str]]:
        """Compares speeds, if it is time to. Returns (worker, what came of that)."""
        if now < self._judged_at + JUDGE_S:
            return []
        self._judged_at = now
        return [one for pool in POOLS for one in self._judge(pool, now)]

    def _judge(self, pool: PoolName, now: float) -> Iterator[tuple[str, str]]:
        present = {
            one: patient
            for one, patient in self._patients.items()
            if patient.present and patient.pool == pool
        }
        typical = {
            one: patient.speed.typical(
                now, (PROBE_SAMPLES if patient.slow.reason else SAMPLES)[pool]
            )
            for one, patient in present.items()
        }
        peers = {
            one: speed
            for one, speed in typical.items()
            if speed is not None and not present[one].slow.reason
        }
        for worker_id, patient in present.items():
            speed, others = typical[worker_id], [peers[one] for one in peers if one != worker_id]
            if speed is None or not others or (patient.slow.reason and not patient.probed):
                continue
            ratio = times_slower(speed, others)
            if ratio is None and patient.slow.reason:
                patient.slow.close(now)
                yield worker_id, "gets new work again, since it is as fast as the others"
            elif ratio is not None and (
                patient.slow.reason
                or sum(bool(one.slow.reason) for one in present.values()) < len(present) // 2
            ):
                patient.speed.clear()
                patient.probed = False
                reason = f"{ratio:.1f} times as slow as the median of the pool's others"
                seconds = patient.slow.open(reason, now)
                yield worker_id, f"gets no new work for {seconds:g} s: {reason}"

    def sick(self) -> list[Sickness]:
        """Workers that are there and get no new work, or one probe at a time."""
        found = []
        for worker_id, patient in self._patients.items():
            if patient.present and patient.failing.reason:
                found.append(Sickness(worker_id, patient.pool, "failing", patient.failing.reason))
            if patient.present and patient.slow.reason:
                found.append(Sickness(worker_id, patient.pool, "slow", patient.slow.reason))
        return found
