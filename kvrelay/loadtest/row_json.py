"""Rows and ledgers as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvrelay.loadtest.row import Row
from kvrelay.types import Attempt, Handoff, Ledger

_LONGEST_S = 1e12  # beyond it, or not a number at all, a time was not measured
Json = dict[str, Any]


def row_to_json(row: Row) -> Json:
    found = asdict(row)
    if row.ledger is not None:
        found["ledger"]["phases"] = dict(row.ledger.phases)
    return found


def row_from_json(value: Json) -> Row:
    """Raises KeyError, TypeError or ValueError for what is no row."""
    return Row(**value | {"itl_s": tuple(value["itl_s"]), "ledger": ledger_from_json(value.get("ledger"))})


def ledger_from_json(value: Json | None) -> Ledger | None:
    """As kvrelay's HTTP door writes it. Raises KeyError, TypeError or ValueError for what is no ledger."""
    if value is None:
        return None
    handoff = value["handoff"]
    ledger = Ledger(
        **value
        | {
            "phases": tuple(dict(value["phases"]).items()),
            "handoff": None if handoff is None else Handoff(**handoff),
            "attempts": tuple(Attempt(**attempt) for attempt in value["attempts"]),
        }
    )
    seconds = [one for _, one in ledger.phases]
    seconds += [ledger.ttft_seconds, ledger.second_token_gap_seconds, ledger.decode_seconds, ledger.e2e_seconds]
    if ledger.handoff is not None:
        seconds += [ledger.handoff.seconds, ledger.handoff.exposed_seconds]
    if not all(abs(one) < _LONGEST_S for one in seconds):
        raise ValueError("its times are not seconds")
    return ledger
