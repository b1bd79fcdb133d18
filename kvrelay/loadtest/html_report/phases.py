"""The phases of a request that the page shows, derived from its ledger."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.loadtest.report.row import Row

# Phases in which the first token travels to the client. The hand-off runs in parallel.
_AFTER_PREFILL = ("return", "emit")
# Kinds of phases. Other phases are waits.
_KINDS = {"prefill": "prefill", "fetch": "handoff", "failed_attempt": "failed"}
# Kind, start, end.
Segment = tuple[str, float, float]


def segments(row: Row) -> list[Segment]:
    """Returns the segments of an answered request, in seconds after the start of the test, in order
    and without gaps.

    The kinds are send (the client and the network), queue, prefill, handoff (a fetch, and the part
    of the hand-off after the end of prefill), decode and failed (lost with a failed worker). The
    first token is sampled at the end of prefill. Without a ledger, the kinds are first (up to the
    first token) and decode.
    """
    if row.ttft_s is None or row.e2e_s is None:
        return []
    first, end = row.scheduled_s + row.ttft_s, row.scheduled_s + row.e2e_s
    ledger = row.ledger
    if ledger is None or not ledger.phases:
        return [("first", row.scheduled_s, first), ("decode", first, end)]
    # When the router received the request.
    now = max(row.scheduled_s, first - ledger.ttft_seconds)
    found = [("send", row.scheduled_s, now)]
    before = [one for one in ledger.phases if one[0] not in _AFTER_PREFILL]
    steps = [(_KINDS.get(name, "queue"), seconds) for name, seconds in before]
    if ledger.handoff is not None:
        steps.append(("handoff", ledger.handoff.exposed_seconds))
    for kind, seconds in steps:
        until = min(now + seconds, end)
        if found[-1][0] == kind:
            found[-1] = (kind, found[-1][1], until)
        else:
            found.append((kind, now, until))
        now = until
    return [*found, ("decode", now, end)]


def ttft_parts(rows: Sequence[Row]) -> dict[str, float]:
    """Returns the mean seconds of the ledger's phases, and of the client and the network before
    them, in the order in which they take place. Empty without ledgers.
    """
    told = [
        (("client and network", max(0.0, row.ttft_s - row.ledger.ttft_seconds)), *row.ledger.phases)
        for row in rows
        if row.ledger is not None and row.ledger.phases and row.ttft_s is not None
    ]
    sums: dict[str, float] = {}
    # A request on the local path has some of the phases only.
    for phases in sorted(told, key=len, reverse=True):
        for name, seconds in phases:
            sums[name] = sums.get(name, 0.0) + seconds
    return {name: total / len(told) for name, total in sums.items()}
