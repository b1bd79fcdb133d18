"""Converts rows and ledgers to and from JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.typed_json import read
from kvrelay.types.ledger_json import ledger_to_json, phases_as_lists
from kvrelay.types.requests import Ledger

Json = dict[str, Any]


def row_to_json(row: Row) -> Json:
    """Returns the row as plain data for JSON. The phases of the ledger become an object."""
    found = asdict(row)
    if row.ledger is not None:
        found["ledger"] = ledger_to_json(row.ledger)
    return found


def row_from_json(value: object) -> Row:
    """Reads the data that `row_to_json` returned. Raises ValueError if the data is not a row."""
    return read(
        Row,
        value | {"ledger": phases_as_lists(value.get("ledger"))}
        if isinstance(value, dict)
        else value,
    )


def ledger_from_json(value: object) -> Ledger | None:
    """Reads a ledger as kvrelay's HTTP endpoint writes it. Raises ValueError if the data is not a
    ledger.
    """
    return None if value is None else read(Ledger, phases_as_lists(value))
