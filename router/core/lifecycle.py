"""The state machine of one request, from its admission to its single end. Pure.

    queued ─▶ reserving ─▶ prefilling ─▶ handing_off ─▶ decoding ─▶ finishing ─▶ finished
       └──────── local path ───▲────────────────────────────▲        any state ─▶ failed | cancelled
       ◀── a worker refused, failed or was lost: back to the queue, for the next attempt

Methods take events and the time, and return effects. An attempt is one placement on workers and has
a number; events of an abandoned attempt are dropped. The next attempt gets the prompt and all
emitted tokens. Sampling is keyed by (seed, position), so the next attempt continues with the same
tokens.

Costs of an attempt that ends early:
- A worker refuses it, a draining worker hands it back, or another tenant preempts it: free.
- Its worker is lost: the attempt counts towards max_attempts, and `router.core.poison_detection`
  weighs the death.
- A worker fails it: the attempt counts towards max_attempts, and the retry uses the router's retry
  budget.
- The model had no next token for the sequence: the first retry uses no budget. If another worker
  has no token either, the request is at fault and fails. If another worker has a token, the first
  worker is at fault (`router.core.dispatcher`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvrelay.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    KvRelayError,
    Unavailable,
    error_for,
)
from kvrelay.types.requests import Attempt, FinishReason, Handoff, Path, SequenceSpec
from kvrelay.worker_messages import (
    Abort,
    Failed,
    HandedOff,
    HandoffTarget,
    Prefill,
    Refused,
    Reserve,
    Reserved,
    RunLocal,
    SequenceTokens,
)
from router.core.effects import Effect, Emit, End, Send
from router.core.ledger import Timeline
from router.core.path_policy import Assignment
from router.core.poison_detection import CrashHistory
from router.core.request import Request
from router.core.retry_budget import RetryBudget
from router.core.workers.link_health import handoff_failed

State = Literal[
    "queued",
    "reserving",
    "prefilling",
    "handing_off",
    "decoding",
    "finishing",
    "finished",
    "failed",
    "cancelled",
]
# A complete answer waits this long for the report of its hand-off. In seconds.
HANDOFF_REPORT_S = 0.25
# A worker's clock may reach the deadline this much earlier than the router's clock. In seconds.
CLOCKS_S = 0.1
# Retry delay sent to the client when there is no worker. In seconds.
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration of a lifecycle."""

    max_attempts: int
    lease_seconds: float
    transport: str


class Lifecycle:
    """One request's state. Each event returns effects, which the caller carries out in order."""

    def __init__(self, request: Request, settings: Settings, budget: RetryBudget) -> None:
        self.request = request
        self.state: State = "queued"
        # Number of the live or last attempt.
        self.attempt = 0
        # Assignment of the live attempt.
        self.assignment: Assignment | None = None
        self.last_assignment: Assignment | None = None
        self.target: HandoffTarget | None = None
        # Tokens of the answer.
        self.tokens: list[int] = list(request.resume)
        # Model version of the first token. Other versions must not continue the answer.
        self.model = request.model
        self.cached_tokens = 0
        # Cached tokens that came from another worker's prefix cache.
        self.fetched_tokens = 0
        self.handoff: Handoff | None = None
        self.attempts: list[Attempt] = []
        self.timeline = Timeline(request.arrival)
        # Workers that failed this request.
        self.avoid: frozenset[str] = frozenset()
        self.crashes = CrashHistory()
        # The worker that had no next token for the sequence. Empty once another worker has a token.
        self.fault = ""
        # Number of attempts that failed on a worker or lost their worker.
        self.failures = 0
        # Number of attempts that gave their batch slot to another tenant.
        self.preemptions = 0
        # Time of the live attempt's first token.
        self.started_at: float | None = None
        self._budget = budget
        self._settings = settings
        # Number of tokens at the start of the attempt.
        self._attempt_start = 0
        # Tokens from the decode worker that arrived before the prefill worker's first token.
        self._early: list[SequenceTokens] = []
        self._finish: FinishReason = "stop"
        self._finish_by = 0.0

    # Derived state

    @property
    def ended(self) -> bool:
        """Whether the request is finished, failed or cancelled."""
        return self.state in ("finished", "failed", "cancelled")

    @property
    def path(self) -> Path | None:
        """Path of the last attempt, or None before the first."""
        return None if self.last_assignment is None else self.last_assignment.path

    @property
    def sequence(self) -> tuple[int, ...]:
        """Token ids of the prompt and the answer so far."""
        return self.request.token_ids + tuple(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and the answer so far."""
        return len(self.request.token_ids) + len(self.tokens)

    @property
    def holders(self) -> tuple[str, ...]:
        """Workers that hold resources for the live attempt. They must be told when it ends."""
        if self.assignment is None or self.state == "finishing" or self.ended:
            return ()
        prefill, decode = self.assignment.prefill, self.assignment.decode
        if prefill and self.state in ("prefilling", "handing_off"):
            return prefill, decode
        return (decode,)

    def is_live(self, worker_id: str, attempt: int) -> bool:
        """Whether the attempt is live and the worker is part of it."""
        placed = self.assignment
        part = placed is not None and worker_id in (placed.prefill, placed.decode)
        return part and attempt == self.attempt and not self.ended

    @property
    def proven(self) -> bool:
        """Whether the attempt has gone further than the last attempt that died with its worker."""
        return self.assignment is not None and self.crashes.outlived(self._decoded)

    @property
    def new_tokens(self) -> int:
        """Number of tokens of the live attempt."""
        return len(self.tokens) - self._attempt_start

    @property
    def _decoded(self) -> int:
        """Number of the live attempt's tokens from its decode worker. -1 if the prefill worker has
        not given its token yet.
        """
        placed = self.assignment
        return self.new_tokens - bool(placed is not None and placed.prefill)

    @property
    def lease_id(self) -> int | None:
        """The lease to renew: granted, and its KV is not committed yet."""
        waiting = self.target is not None and self.state in ("prefilling", "handing_off")
        return self.target.lease_id if waiting and self.target is not None else None

    # Events

    def assign(self, assignment: Assignment, attempt: int, now: float) -> list[Effect]:
        """Starts an attempt. The number must be unique in this router."""
        assert self.state == "queued", f"{self.request.request_id} was assigned while {self.state}"
        self.timeline.mark("queue", now)
        if self.attempt == 0:
            self._budget.deposit()
        self.attempt = attempt
        self.assignment = self.last_assignment = assignment
        self._attempt_start = len(self.tokens)
        self.started_at = None
        if assignment.path == "local":
            self.state = "prefilling"
            return [Send(assignment.decode, RunLocal(self._spec(now)))]
        self.state = "reserving"
        return [
            Send(
                assignment.decode,
                Reserve(self._spec(now), self._settings.lease_seconds, assignment.prefill),
            )
        ]

    def on_event(
        self,
        worker_id: str,
        event: Reserved | Refused | SequenceTokens | HandedOff | Failed,
        now: float,
    ) -> list[Effect]:
        """Handles a worker's event. Drops events of other attempts and of workers outside the live
        attempt.
        """
        if not self.is_live(worker_id, event.attempt):
            return []
        match event:
            case SequenceTokens():
                return self._tokens(worker_id, event, now)
            case Reserved():
                return self._reserved(worker_id, event.target, now)
            case Refused():
                return self._refused(worker_id)
            case HandedOff():
                return self._handed_off(worker_id, event.handoff)
            case Failed():
                return self._failed(worker_id, event, now)

    def worker_lost(self, worker_id: str, expected: bool, now: float) -> list[Effect]:
        """Handles the loss of a worker with everything that it held. `expected`: the worker was
        draining.
        """
        if self.assignment is None or self.ended:
            return []
        planned = self.state == "reserving" and worker_id == self.assignment.prefill
        if worker_id not in self.holders and not planned:
            return []
        reason = f"{worker_id} was lost"
        if expected or planned:
            return self._again(reason, worker_id, now)
        if self._computes(worker_id):
            self.crashes.worker_died(self._decoded, now)
            if self.crashes.is_poison:
                error = Internal(
                    f"{self.crashes.deaths} workers crashed while they computed this "
                    "request; it is not retried"
                )
                return self._give_up(error, reason, gone=worker_id)
        return self._retry(
            Unavailable(reason, retry_after_s=RETRY_AFTER_S), reason, worker_id, now, paid=False
        )

    def _computes(self, worker_id: str) -> bool:
        """Whether the worker is computing this request, so that the request may have caused its
        death.
        """
        assert self.assignment is not None
        if self.state == "prefilling" and self.assignment.prefill:
            return worker_id == self.assignment.prefill
        return self.state != "reserving" and worker_id == self.assignment.decode

    def complete(self, reason: FinishReason, now: float) -> list[Effect]:
        """Completes the answer with the tokens so far. The router calls this method when the text
        reaches a stop string, which workers cannot detect.
        """
        return [] if self.ended or self.state == "finishing" else self._complete(reason, now)

    def cancel(self, error: KvRelayError) -> list[Effect]:
        """Ends the request from outside: the client disconnected, or the router stops."""
        return [] if self.ended else self._give_up(error, error.message)

    def is_due(self, now: float) -> bool:
        """Whether a worker may have seen the deadline pass."""
        return now >= self.request.deadline - CLOCKS_S

    def expire(self, no_worker: str, gone: str = "") -> list[Effect]:
        """Ends the request at its deadline.

        - no_worker: explanation if no worker could serve the request, else empty.
        - gone: worker that holds nothing of the attempt any more.
        """
        if self.ended:
            return []
        if self.state == "finishing":
            return self._end()
        if no_worker and self.state == "queued":
            return self._give_up(Unavailable(no_worker, retry_after_s=RETRY_AFTER_S), "deadline")
        state = self.state.replace("_", " ")
        return self._give_up(
            DeadlineExceeded(
                f"the deadline passed while the request was {state}; send a later deadline"
            ),
            "deadline",
            gone,
        )

    def preempt(self, now: float) -> list[Effect]:
        """Abandons the attempt in favour of another tenant's request. The preemption counts against
        neither the request nor its workers.
        """
        assert self.holders, f"{self.request.request_id} was preempted while {self.state}"
        self.timeline.mark("preempted", now)
        self._record("preempted: another tenant had less than its share")
        self.preemptions += 1
        return self._requeue("")

    def tick(self, now: float) -> list[Effect]:
        """Ends a finishing request when the wait for its hand-off report is over."""
        return self._end() if self.state == "finishing" and now >= self._finish_by else []

    # Steps

    def _spec(self, now: float) -> SequenceSpec:
        request = self.request
        return SequenceSpec(
            request_id=request.request_id,
            attempt=self.attempt,
            token_ids=self.sequence,
            prompt_len=len(request.token_ids),
            sampling=request.sampling,
            salt=request.salt,
            priority=request.priority,
            deadline_s=request.deadline - now,
            tenant=request.tenant.name,
            weight=request.tenant.weight,
            itl_s=_seconds(request.slo.itl_ms),
            adapter=request.adapter,
        )

    def _reserved(self, worker_id: str, target: HandoffTarget, now: float) -> list[Effect]:
        assert self.assignment is not None
        if self.state != "reserving" or worker_id != self.assignment.decode:
            return []
        if now >= self.request.deadline:
            return self.expire("")
        self.timeline.mark("reserve", now)
        self.target = target
        self.state = "prefilling"
        target = replace(target, transport=self._settings.transport)
        return [
            Send(self.assignment.prefill, Prefill(self._spec(now), target, self.assignment.source))
        ]

    def _refused(self, worker_id: str) -> list[Effect]:
        """Requeues the request. The worker did no work, so the placement does not count as an
        attempt.
        """
        if self.state not in ("reserving", "prefilling") or worker_id not in self.holders:
            return []
        return self._requeue(gone=worker_id)

    def _tokens(self, worker_id: str, event: SequenceTokens, now: float) -> list[Effect]:
        assert self.assignment is not None
        if self.state in ("queued", "reserving", "finishing"):
            return []
        from_decode = worker_id == self.assignment.decode
        if event.index > len(self.tokens):
            if from_decode and self.assignment.prefill and self.state == "prefilling":
                # The streams of the two workers are not ordered relative to each other.
                self._early.append(event)
                return []
            reason = f"{worker_id} sent token {event.index}; expected token {len(self.tokens)}"
            return self._retry(Internal(reason), reason, worker_id, now, gone=False)

        effects = self._accept(event, now)
        if from_decode:
            # The tokens prove the commit, if there was a hand-off.
            self.state = "decoding"
        elif self.state == "prefilling":
            self.state = "handing_off" if self.handoff is None else "decoding"
        if event.finish_reason is not None and event.index + len(event.token_ids) >= len(
            self.tokens
        ):
            return effects + self._complete(event.finish_reason, now, ended_on=worker_id)
        if len(self.tokens) >= self.request.sampling.max_tokens:
            return effects + self._complete("length", now)
        if not from_decode:
            early, self._early = self._early, []
            decode = self.assignment.decode
            for one in sorted(early, key=lambda one: one.index):
                effects += self.on_event(decode, one, now)
        return effects

    def _accept(self, event: SequenceTokens, now: float) -> list[Effect]:
        """Accepts the new tokens. Drops duplicates and tokens beyond max_tokens."""
        assert self.assignment is not None
        start = len(self.tokens)
        token_ids, logprobs = event.token_ids, event.logprobs
        if start != event.index or start + len(token_ids) > self.request.sampling.max_tokens:
            new = slice(start - event.index, self.request.sampling.max_tokens - event.index)
            token_ids, logprobs = token_ids[new], logprobs[new]
        if not token_ids:
            return []
        if not self.timeline.has_first_token and event.prefill is not None:
            self.cached_tokens = min(event.prefill.cached_tokens, len(self.request.token_ids))
            self.fetched_tokens = event.prefill.fetched_tokens
            self._note_prediction()
        if self.model is None or self.assignment.model.full:
            self.model = self.assignment.model
        self.timeline.tokens(now, len(token_ids), event.prefill, event.dropped_tokens)
        if self.started_at is None:
            self.started_at = now
        self.tokens += token_ids
        self.fault = ""
        path, scores = self.assignment.path, event.prompt_logprobs
        return [Emit(self.request.request_id, start, token_ids, logprobs, path, scores)]

    def _note_prediction(self) -> None:
        """Adds to the reason how many prompt tokens were cached, if that differs from the
        prediction: blocks may have been evicted since, a fetch was slower than computing, or a tier
        had more.
        """
        assert self.assignment is not None
        prompt, cached = len(self.request.token_ids), self.cached_tokens
        if min(self.assignment.cached_tokens, prompt) != cached:
            missed = f"then {cached} of {prompt} prompt tokens were found cached"
            self.assignment = self.last_assignment = replace(self.assignment, missed=missed)

    def _handed_off(self, worker_id: str, handoff: Handoff) -> list[Effect]:
        assert self.assignment is not None
        if worker_id != self.assignment.prefill:
            return []
        self.handoff = handoff
        if self.state == "finishing":
            return self._end()
        if self.state == "handing_off":
            self.state = "decoding"
        return []

    def _failed(self, worker_id: str, event: Failed, now: float) -> list[Effect]:
        assert self.assignment is not None
        if self.state == "finishing":
            return self._end() if worker_id == self.assignment.prefill else []
        if worker_id not in self.holders:
            # The prefill worker did not receive the acknowledgement of the commit, but the decode
            # worker's tokens prove the commit.
            return []
        if event.code is Code.INVALID_ARGUMENT:
            return self._give_up(InvalidArgument(event.message), event.message, gone=worker_id)
        if event.drains:
            return self._again(f"{worker_id} was drained", worker_id, now)
        if event.code is Code.DEADLINE_EXCEEDED and self.is_due(now):
            return self.expire("", gone=worker_id)
        if event.of_sequence:
            return self._faulted(worker_id, event.message, now)
        if handoff_failed(self.assignment, worker_id, event.code):
            self.avoid |= {self.assignment.prefill, self.assignment.decode}
        retry_after_s = (
            RETRY_AFTER_S if event.code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED) else None
        )
        error = error_for(event.code, f"{worker_id}: {event.message}", retry_after_s=retry_after_s)
        return self._retry(error, error.message, worker_id, now)

    def _faulted(self, worker_id: str, message: str, now: float) -> list[Effect]:
        """Retries once after a sequence without a next token. The retry uses no retry budget, so
        poison requests cannot use up the budget of other requests.
        """
        before, self.fault = self.fault, worker_id
        self.failures += 1
        reason = f"{worker_id}: {message}"
        if before or self.failures >= self._settings.max_attempts:
            where = f"; {before} failed on it too" if before else ""
            return self._give_up(Internal(f"{reason}{where}"), reason, gone=worker_id)
        return self._again(reason, worker_id, now)

    # Ends

    def _retry(
        self,
        error: KvRelayError,
        outcome: str,
        worker_id: str,
        now: float,
        gone: bool = True,
        paid: bool = True,
    ) -> list[Effect]:
        """Abandons the attempt because of `worker_id`. Retries, or fails with the error after too
        many failures.

        - gone: the worker holds nothing of the attempt any more.
        - paid: the retry uses the retry budget.
        """
        ended_on = worker_id if gone else ""
        self.failures += 1
        if self.failures >= self._settings.max_attempts:
            return self._give_up(error, outcome, ended_on)
        if paid and not self._budget.withdraw(now):
            text = (
                f"{error.message}; the request is not retried, because the retry budget is used up"
            )
            return self._give_up(Unavailable(text, retry_after_s=RETRY_AFTER_S), outcome, ended_on)
        return self._again(outcome, worker_id, now, gone)

    def _again(self, outcome: str, worker_id: str, now: float, gone: bool = True) -> list[Effect]:
        """Abandons the attempt and requeues the request. The next attempt avoids the worker if
        possible.
        """
        self.timeline.mark("failed_attempt", now)
        self._record(outcome)
        self.avoid |= {worker_id}
        return self._requeue(worker_id if gone else "")

    def _requeue(self, gone: str) -> list[Effect]:
        effects = self._abort(gone)
        self.state = "queued"
        self.assignment = None
        self.target = None
        self.handoff = None
        self._early = []
        return effects

    def _give_up(self, error: KvRelayError, outcome: str, gone: str = "") -> list[Effect]:
        effects = self._abort(gone)
        self._record(outcome)
        cancelled = isinstance(error, Cancelled)
        self.state = "cancelled" if cancelled else "failed"
        return [
            *effects,
            End(self.request.request_id, "cancelled" if cancelled else "error", error),
        ]

    def _complete(self, reason: FinishReason, now: float, ended_on: str = "") -> list[Effect]:
        """Completes the answer. The worker `ended_on` needs no abort. Waits HANDOFF_REPORT_S for a
        missing hand-off report.
        """
        effects = self._abort(ended_on)
        report_due = (
            self.state == "decoding" and self.path == "disaggregated" and self.handoff is None
        )
        self._finish = reason
        self._record("finished")
        if report_due:
            self.state = "finishing"
            self._finish_by = now + HANDOFF_REPORT_S
            return effects
        return [*effects, *self._end()]

    def _end(self) -> list[Effect]:
        self.state = "finished"
        return [End(self.request.request_id, self._finish)]

    def _abort(self, gone: str) -> list[Effect]:
        """Returns an abort for each holder except the worker `gone`."""
        abort = Abort(self.request.request_id, self.attempt)
        return [Send(holder, abort) for holder in self.holders if holder != gone]

    def _record(self, outcome: str) -> None:
        if (one := self.assignment) is not None:
            self.attempts.append(
                Attempt(
                    one.path, one.why_for(self.request.tenant), one.prefill, one.decode, outcome
                )
            )
            self.timeline.end_attempt()


def _seconds(milliseconds: float | None) -> float | None:
    """Returns positive milliseconds as seconds above 0, which is what workers accept. The smallest
    floats become 0 in a division.
    """
    return None if milliseconds is None else milliseconds / 1000 or milliseconds
