"""Worker health: circuit breaking of failing workers and ejection of slow workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from kvrelay.types.workers import POOLS, PoolName
from router.core.workers.circuit_breaker import Breaker
from router.core.workers.latency_outliers import RecentLatency, times_slower

# Number of consecutive failures that opens a worker's breaker.
FAILURES = 3
OPEN_S = (1.0, 60.0)
EJECT_S = (5.0, 300.0)
# Interval of the latency comparison.
JUDGE_S = 1.0
# Samples needed to judge a worker.
SAMPLES: dict[PoolName, int] = {"decode": 16, "prefill": 5}
PROBE_SAMPLES: dict[PoolName, int] = {"decode": 8, "prefill": 1}
# Limit on remembered lost workers.
MOST = 256

Cause = Literal["failing", "slow"]


@dataclass(frozen=True, slots=True)
class Sickness:
    """The reason why a worker gets no new work, for observers."""

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
    latency: RecentLatency = field(default_factory=RecentLatency)
    # True once the worker has got a probe since its ejection.
    probed: bool = False


class Health:
    """This router's record of each worker's failures and latency.

    - Failures: FAILURES consecutive failed attempts open the breaker. Each must have begun after
      the previous failure, so a failed step that fails its whole batch counts once. The loss of a
      worker with running requests is a failure too and is remembered under the worker's id, so a
      worker in a crash loop gets no new work. A token or a hand-off is a success.
    - Slowness: the time of a decode step or a prompt is compared with the median of the pool's
      other workers (`router.core.workers.latency_outliers`). At most half of a pool, rounded down,
      is ejected at a time, so the last worker always stays. If all workers get slower, none is
      ejected.
    """

    def __init__(self) -> None:
        self._patients: dict[str, _Patient] = {}
        self._judged_at = 0.0

    def found(self, worker_id: str, pool: PoolName) -> None:
        """Records that a worker is present. A known id in the same pool keeps its failures."""
        patient = self._patients.get(worker_id)
        if patient is None or patient.pool != pool:
            patient = self._patients[worker_id] = _Patient(pool)
        patient.present = True
        patient.latency.clear()

    def lost(self, worker_id: str) -> None:
        """Records that a worker is gone. The failures of the MOST workers that were lost last are
        remembered.
        """
        # At the end of the dict, so that `gone` is in order of loss.
        patient = self._patients[worker_id] = self._patients.pop(worker_id)
        patient.present = False
        gone = [one for one, patient in self._patients.items() if not patient.present]
        if len(gone) > MOST:
            del self._patients[gone[0]]

    def fit(self, worker_id: str, now: float) -> bool:
        """Whether the worker may get new work at `now`."""
        patient = self._patients[worker_id]
        return patient.failing.passes(now) and patient.slow.passes(now)

    def placed(self, worker_id: str, now: float) -> None:
        """Records that a request was placed on the worker. For a sick worker the request is a
        probe.
        """
        patient = self._patients[worker_id]
        patient.failing.passed(now)
        patient.slow.passed(now)
        if patient.slow.reason and not patient.probed:
            patient.probed = True
            # Samples from before the ejection do not describe the current speed.
            patient.latency.clear()

    def troubled(self, worker_id: str) -> bool:
        """Whether the worker has failures that a success would clear."""
        return self._patients[worker_id].failures > 0

    def succeeded(self, worker_id: str, begun: float, now: float) -> str:
        """Records the success of an attempt that began at `begun`. Returns a notice for the log, or
        an empty string.
        """
        patient = self._patients[worker_id]
        if begun <= patient.failed_at:
            # The attempt began before the last failure, so its success proves nothing.
            return ""
        patient.failures = 0
        if not patient.failing.reason:
            return ""
        patient.failing.close(now)
        return "gets new work again, since a probe went well"

    def failed(self, worker_id: str, begun: float, reason: str, now: float) -> str:
        """Records the failure of an attempt that began at `begun`. Returns a notice for the log, or
        an empty string.
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
        """Records the duration of a work item in seconds: a decode step of `size` sequences or a
        prompt of `size` tokens.
        """
        self._patients[worker_id].latency.add(now, size, seconds)

    def judge(self, now: float) -> list[tuple[str, str]]:
        """Compares the workers' latencies, at most every JUDGE_S. Returns (worker, notice)
        pairs.
        """
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
            one: patient.latency.typical(
                now, (PROBE_SAMPLES if patient.slow.reason else SAMPLES)[pool]
            )
            for one, patient in present.items()
        }
        peers = {
            one: latency
            for one, latency in typical.items()
            if latency is not None and not present[one].slow.reason
        }
        for worker_id, patient in present.items():
            latency, others = typical[worker_id], [peers[one] for one in peers if one != worker_id]
            if latency is None or not others or (patient.slow.reason and not patient.probed):
                continue
            ratio = times_slower(latency, others)
            if ratio is None and patient.slow.reason:
                patient.slow.close(now)
                yield worker_id, "gets new work again, since it is as fast as the others"
            elif ratio is not None and (
                patient.slow.reason
                or sum(bool(one.slow.reason) for one in present.values()) < len(present) // 2
            ):
                patient.latency.clear()
                patient.probed = False
                reason = f"{ratio:.1f} times as slow as the median of the pool's others"
                seconds = patient.slow.open(reason, now)
                yield worker_id, f"gets no new work for {seconds:g} s: {reason}"

    def sick(self) -> list[Sickness]:
        """Returns the present workers that get no new work, or only one probe at a time."""
        found = []
        for worker_id, patient in self._patients.items():
            if patient.present and patient.failing.reason:
                found.append(Sickness(worker_id, patient.pool, "failing", patient.failing.reason))
            if patient.present and patient.slow.reason:
                found.append(Sickness(worker_id, patient.pool, "slow", patient.slow.reason))
        return found
