"""Converts rows and ledgers to and from JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.typed_json import read
from kvrelay.types.requests import Ledger

Json = dict[str, Any]


def row_to_json(row: Row) -> Json:
    """Returns the row as plain data for JSON. The phases of the ledger become an object."""
    found = asdict(row)
    if row.ledger is not None:
        found["ledger"]["phases"] = dict(row.ledger.phases)
    return found


def row_from_json(value: object) -> Row:
    """Reads the data that `row_to_json` returned. Raises ValueError if the data is not a row."""
    return read(
        Row, value | {"ledger": _listed(value.get("ledger"))} if isinstance(value, dict) else value
    )


def ledger_from_json(value: object) -> Ledger | None:
    """Reads a ledger as kvrelay's HTTP endpoint writes it. Raises ValueError if the data is not a
    ledger.
    """
    return None if value is None else read(Ledger, _listed(value))


def _listed(ledger: object) -> object:
    """Converts the phases from an object to the ordered list that a Ledger has."""
    if not isinstance(ledger, dict) or not isinstance(ledger.get("phases"), dict):
        return ledger
    return ledger | {"phases": [list(one) for one in ledger["phases"].items()]}
