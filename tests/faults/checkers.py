"""The invariants of the fault matrix, each a function of what was recorded. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from faults.history import WHOLE, Case, Ended, RequestHistory, WorkerSample

# For an answer to be on its way through a busy machine; deadlines in tests are no shorter
DEADLINE_SLACK_S = 5.0
# Between two samples of a worker on an idle machine, with much to spare
LAG_S = 0.05


class Invariant(Enum):
    """What must hold whatever fault happened. The value is a sentence for a failed check."""

    BLOCKS = "both sides return all KV blocks within the lease, and every block is accounted for"
    TOKENS = "each token index from 0 to n-1 comes once, in order"
    ANSWER = "the token ids, greedy or seeded, are those of a run without the fault"
    ONE_END = "each request ends exactly once, and nothing comes after its end"
    DEADLINE = "each request ends by its deadline"
    UNHARMED = "other requests and other processes are unharmed"
    OWN_KV = "no answer is computed from another request's KV"
    HAPPENED = "the fault happened"


ALWAYS = frozenset({Invariant.ONE_END, Invariant.UNHARMED, Invariant.HAPPENED})


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: Invariant, text: str) -> None:
        super().__init__(f"{invariant.name}, {invariant.value}: {text}")
        self.invariant = invariant


def check(case: Case, *invariants: Invariant) -> None:
    """Checks `invariants`, and those in ALWAYS. Raises Violation."""
    for invariant, checker in CHECKERS.items():
        if invariant in ALWAYS or invariant in invariants:
            checker(case)


def check_one_end(case: Case) -> None:
    for request in case.everyone:
        if len(request.ends) != 1:
            statuses = [one.status for one in request.ends]
            raise Violation(
                Invariant.ONE_END, f"{request.request_id} ended {len(statuses)} times: {statuses}"
            )
        if not isinstance(request.events[-1], Ended):
            raise Violation(
                Invariant.ONE_END, f"{request.request_id}: {request.events[-1]} came after the end"
            )


def check_tokens(case: Case) -> None:
    for request in case.everyone:
        due = 0
        for one in request.received:
            if one.index != due:
                raise Violation(
                    Invariant.TOKENS,
                    f"{request.request_id}: token {one.index} came where {due} was due",
                )
            due += len(one.token_ids)
        if (
            request.ends
            and request.end.status == "length"
            and request.expected
            and due != len(request.expected)
        ):
            raise Violation(
                Invariant.TOKENS,
                f"{request.request_id} has {due} tokens of {len(request.expected)}",
            )


def check_same(case: Case) -> None:
    compared = 0
    for request in case.everyone:
        if request.expected is None:
            continue
        got, expected = request.token_ids, request.expected
        if not (request.ends and request.end.status in WHOLE):
            expected = expected[: len(got)]
        if got != expected:
            at = next(
                (n for n, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), len(got)
            )
            raise Violation(
                Invariant.ANSWER,
                f"{request.request_id}: {len(got)} tokens, and token {at} is not that of the "
                f"run without a fault",
            )
        compared += len(got)
    if not compared:
        raise Violation(Invariant.ANSWER, "no token was compared with any")


def check_deadline(case: Case) -> None:
    limited = [one for one in case.everyone if one.deadline_s is not None]
    if not limited:
        raise Violation(Invariant.DEADLINE, "no request had a deadline")
    for request in limited:
        assert request.deadline_s is not None
        took = request.events[-1].at - request.began_at
        if took > request.deadline_s + DEADLINE_SLACK_S:
            raise Violation(
                Invariant.DEADLINE,
                f"{request.request_id} took {took:.1f} s of {request.deadline_s:g}",
            )


def check_blocks(case: Case) -> None:
    """From the last request's end on. Workers that died hold nothing; each one that was asked has
    to be at rest.
    """
    if not case.after:
        raise Violation(Invariant.BLOCKS, "no worker was asked what it holds")
    last = {sample.worker_id: sample for sample in case.after}
    for sample in last.values():
        if not sample.at_rest:
            raise Violation(
                Invariant.BLOCKS,
                f"{sample.worker_id} holds {sample.blocks_held} blocks of {sample.busy} sequences",
            )
        if sample.integrity_error:
            raise Violation(Invariant.BLOCKS, f"{sample.worker_id}: {sample.integrity_error}")
        if not 0 <= sample.blocks_cached <= sample.blocks_total:
            raise Violation(
                Invariant.BLOCKS,
                f"{sample.worker_id} has {sample.blocks_cached} cached of "
                f"{sample.blocks_total} blocks",
            )
    ended_at = max((one.events[-1].at for one in case.everyone), default=case.after[0].at)
    for worker_id in last:
        samples = [one for one in case.after if one.worker_id == worker_id]
        held_s = _held_s(samples, ended_at)
        if held_s > case.lease_s:
            raise Violation(
                Invariant.BLOCKS,
                f"{worker_id} held blocks for {held_s:.1f} s after the end; a lease is "
                f"{case.lease_s:g} s",
            )


def _held_s(samples: list[WorkerSample], ended_at: float) -> float:
    """Seconds from the end until the worker was at rest. Between two samples at most LAG_S count,
    since on a busy machine both the worker and who asks it stand still for longer.
    """
    held_s, before = 0.0, ended_at
    for one in samples:
        held_s += min(LAG_S, max(0.0, one.at - before))
        before = one.at
        if one.at_rest:
            break
    return held_s


def check_unharmed(case: Case) -> None:
    """Bystanders' answers are whole, and no process but a victim has ended or come anew."""
    for request in case.bystanders:
        if not request.ends or request.end.status not in WHOLE:
            status = [one.status for one in request.ends]
            raise Violation(
                Invariant.UNHARMED,
                f"{request.request_id} had nothing to do with it and ended with {status}",
            )
    victims = {name for fault in case.faults for name in fault.victims}
    now = {sample.worker_id: (sample.pid, sample.epoch) for sample in case.after}
    for sample in case.before:
        was, became = (sample.pid, sample.epoch), now.get(sample.worker_id)
        if sample.worker_id not in victims and became != was:
            raise Violation(
                Invariant.UNHARMED, f"{sample.worker_id} was (pid, epoch) {was}, is {became}"
            )


def check_own_kv(case: Case) -> None:
    """KV of another's prompt gives another answer: so each one's is its own, and none is anyone
    else's.
    """
    answers = [(one.request_id, one.expected) for one in case.everyone if one.expected]
    if len({answer for _, answer in answers}) < max(2, len(answers)):
        raise Violation(Invariant.OWN_KV, "the answers are too alike to tell whose KV was read")
    check_for: dict[tuple[int, ...], str] = {answer: name for name, answer in answers if answer}
    for request in case.everyone:
        owner = check_for.get(request.token_ids)
        if owner is not None and owner != request.request_id:
            raise Violation(Invariant.OWN_KV, f"{request.request_id} got the answer of {owner}")
    try:
        check_same(case)
    except Violation as error:
        raise Violation(Invariant.OWN_KV, str(error)) from None


def check_happened(case: Case) -> None:
    if not case.faults:
        raise Violation(Invariant.HAPPENED, "no fault was recorded")
    for fault in case.faults:
        if not fault.evidence:
            raise Violation(Invariant.HAPPENED, f"nothing shows that it happened: {fault.name}")


CHECKERS: dict[Invariant, Callable[[Case], None]] = {
    Invariant.ONE_END: check_one_end,
    Invariant.BLOCKS: check_blocks,
    Invariant.DEADLINE: check_deadline,
    Invariant.ANSWER: check_same,
    Invariant.UNHARMED: check_unharmed,
    Invariant.TOKENS: check_tokens,
    Invariant.HAPPENED: check_happened,
    Invariant.OWN_KV: check_own_kv,
}


def differing(requests: Iterable[RequestHistory]) -> int:
    """How many tokens are not those of the run without a fault: lost, doubled or wrong ones."""
    return sum(
        sum(a != b for a, b in zip(one.token_ids, one.expected or (), strict=False))
        + abs(len(one.token_ids) - len(one.expected or ()))
        for one in requests
    )
