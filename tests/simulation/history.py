"""What the clients of a simulation saw, and the judges of it. Pure: facts in, complaints out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from simulation.toy_engine import answer

from kvrelay.types.requests import SamplingParams

UPGRADES = ("upgrade the model", "roll the model back")
DEADLINE_SLACK_S = 0.25  # ticks of the router, and turns of its streams
_ROUNDING_S = 1e-6  # the router's clock starts elsewhere


@dataclass(frozen=True, slots=True)
class Plan:
    """What a client asks for, and how it behaves."""

    request_id: str
    at: float
    prompt: tuple[int, ...]
    sampling: SamplingParams
    timeout: float
    priority: int = 0
    tenant: str = ""
    cache_salt: str | None = None
    stop_token: int | None = None  # its text is a stop string
    cancel_in: str = ""  # a state of the request; the client leaves as soon as it is seen
    read_pause: float = 0.0  # between two reads
    poison: bool = False

    @property
    def deadline(self) -> float:
        return self.at + self.timeout

    def expected(self, version: int = 0) -> tuple[int, ...]:
        """The tokens of an answer that nothing happens to, of a version of the model."""
        tokens = answer(self.prompt, self.sampling, version)
        if self.stop_token in tokens:
            return tokens[: tokens.index(self.stop_token) + 1]
        return tokens


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens as they came to the client; `index` is the first one's number."""

    time: float
    index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """`outcome` is a finish reason or the name of an error's code."""

    time: float
    outcome: str
    message: str = ""


@dataclass(slots=True)
class Record:
    """One client's history."""

    plan: Plan
    parts: list[Part] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    left_in: str = ""  # the state in which the client cancelled
    attempts: tuple[str, ...] = ()  # how each attempt ended, as the router tells it
    routers: int = 0  # that it was sent to
    fingerprint: str = ""  # of the model, as the router told it

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for part in self.parts for token in part.token_ids)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that was done to the cluster, from `start` until all it led to was over."""

    kind: str
    start: float
    end: float
    loses_worker: bool = False
    stops_router: bool = False


def judge_numbers(record: Record) -> list[str]:
    """T: token indices 0 to n-1, each once and in order."""
    complaints, due = [], 0
    for part in record.parts:
        if part.index != due:
            complaints.append(f"T: token {part.index} came where {due} was due")
        due = part.index + len(part.token_ids)
    return complaints


def judge_tokens(record: Record, versions: int = 1) -> list[str]:
    """G and X: the tokens are those of one version's unfaulted answer, all of them where it ended
    well.
    """
    tokens = record.tokens
    answers = [record.plan.expected(version) for version in range(versions)]
    fitting = [one for one in answers if tokens == one[: len(tokens)]]
    if len(fitting) > 1 and tokens in fitting:
        fitting = [tokens]
    if versions > 1 and not fitting:
        return [f"G: the tokens are of no one version of the model: {tokens} for {answers}"]
    expected = (fitting or answers)[0]
    if tokens != expected[: len(tokens)]:
        wrong = next(
            i for i, token in enumerate(tokens) if i >= len(expected) or token != expected[i]
        )
        return [f"G: token {wrong} is not that of the unfaulted answer: {tokens} for {expected}"]
    if record.ends and record.ends[0].outcome in ("length", "stop") and tokens != expected:
        return [f"G: the answer ended well after {len(tokens)} of {len(expected)} tokens"]
    return []


def judge_end(record: Record) -> list[str]:
    """1: exactly one terminal status, and nothing after it."""
    if len(record.ends) != 1:
        return [f"1: {len(record.ends)} terminal statuses: {record.ends}"]
    end = record.ends[0]
    late = [part for part in record.parts if part.time > end.time]
    return [f"1: tokens {late[0].index}.. came after the end"] if late else []


def judge_deadline(record: Record, faults: Sequence[Fault]) -> list[str]:
    """D: over at the deadline, but for the time in which the router stood still; not before it for
    its sake.

    A client that reads slowly has its last tokens and then the end one pause after the other.
    """
    plan, end = record.plan, record.ends[0]
    stopped = sum(
        max(0.0, min(one.end, end.time) - max(one.start, plan.at))
        for one in faults
        if one.stops_router
    )
    complaints = []
    if end.time > plan.deadline + DEADLINE_SLACK_S + 2 * plan.read_pause + stopped:
        complaints.append(
            f"D: ended at {end.time:.3f}, {end.time - plan.deadline:.3f} s after its deadline"
        )
    if end.outcome == "DEADLINE_EXCEEDED" and end.time < plan.deadline - _ROUNDING_S:
        complaints.append(f"D: expired {plan.deadline - end.time:.3f} s before its deadline")
    return complaints


def judge_outcome(record: Record, faults: Sequence[Fault], max_attempts: int) -> list[str]:
    """L: it ends well unless the client left, time was up, the queue was full, or the faults in its
    time explain it.
    """
    plan, end = record.plan, record.ends[0]
    mine = [one for one in faults if one.start <= end.time and one.end >= plan.at]
    losses = sum(one.loses_worker for one in mine)
    match end.outcome:
        case "length" | "stop":
            fine = not plan.poison
        case "CANCELLED":
            fine = bool(record.left_in)
        case "DEADLINE_EXCEEDED":
            fine = True
        case "RESOURCE_EXHAUSTED":
            fine = not record.parts or record.routers > 1
        case "UNAVAILABLE" if end.time >= plan.deadline - _ROUNDING_S:
            fine = True
        case "UNAVAILABLE" | "FAILED_PRECONDITION" if "model version" in end.message:
            fine = any(one.kind in UPGRADES and one.start <= end.time for one in faults)
        case "INTERNAL" if "workers crashed" in end.message or "may kill" in end.message:
            fine = plan.poison or losses >= 2
        case _:
            fine = len(record.attempts) >= max_attempts and len(mine) + 1 >= max_attempts
    if fine:
        return []
    return [
        f"L: ended {end.outcome} ({end.message}) after {record.attempts} and {len(mine)} "
        f"faults in its time"
    ]


def judge(
    records: Iterable[Record], faults: Sequence[Fault], max_attempts: int, versions: int = 1
) -> list[str]:
    complaints = []
    for record in records:
        found = judge_numbers(record) + judge_tokens(record, versions) + judge_end(record)
        if len(record.ends) == 1:
            found += judge_deadline(record, faults) + judge_outcome(record, faults, max_attempts)
        complaints += [f"request {record.plan.request_id}: {one}" for one in found]
    return complaints


def judge_incarnations(incarnations: Sequence[tuple[str, int]]) -> list[str]:
    """No worker has the name and the epoch of another one, ever."""
    twice = [one for one, count in Counter(incarnations).items() if count > 1]
    return [f"E: {name} with epoch {epoch} was there twice" for name, epoch in twice]


@dataclass(frozen=True, slots=True)
class Act:
    """Something that only a leader may do, and that took effect."""

    time: float
    owner: str
    term: int
    what: str


def judge_acts(acts: Sequence[Act], *, forgotten: bool = False) -> list[str]:
    """Nobody acts after a successor has acted, unless under a later term than before.

    forgotten: Redis has lost writes. Then it may not know the successor's term, nor does anybody if
    the successor died or is out of touch, so no later term can be told to exceed it. A term that
    exceeds all that the owner itself had is a lead of its own, and leads are judged by their time.
    """
    complaints = []
    last: dict[str, int] = {}  # owner -> index of its last act
    for index, act in enumerate(acts):
        before = last.get(act.owner)
        if before is not None:
            between = [one for one in acts[before + 1 : index] if one.owner != act.owner]
            rivals = [acts[before]] if forgotten else [acts[before], *between]
            if between and act.term <= max(one.term for one in rivals):
                other = between[-1]
                complaints.append(
                    f"E: {act.owner} in term {act.term}: {act.what} at {act.time:.3f}, after "
                    f"{other.owner} in term {other.term}: {other.what} at {other.time:.3f}"
                )
        last[act.owner] = index
    return complaints


def judge_leaders(time: float, leaders: Sequence[str]) -> list[str]:
    """At most one controller acts at a time."""
    return [f"E: {' and '.join(sorted(leaders))} lead at {time:.3f}"] if len(leaders) > 1 else []


def judge_index(believed: Iterable[int], held: Iterable[int]) -> list[str]:
    """I: a router believes of a worker's cache what the cache holds."""
    believed, held = set(believed), set(held)
    complaints = []
    if believed - held:
        complaints.append(f"believes in {len(believed - held)} blocks that it does not hold")
    if held - believed:
        complaints.append(f"does not know {len(held - believed)} of its {len(held)} blocks")
    return complaints
