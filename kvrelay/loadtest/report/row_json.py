"""Rows and ledgers as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.report.typed_json import read
from kvrelay.types import Ledger

Json = dict[str, Any]


def row_to_json(row: Row) -> Json:
    found = asdict(row)
    if row.ledger is not None:
        found["ledger"]["phases"] = dict(row.ledger.phases)
    return found


def row_from_json(value: object) -> Row:
    """Raises ValueError for what is no row."""
    return read(
        Row, value | {"ledger": _listed(value.get("ledger"))} if isinstance(value, dict) else value
    )


def ledger_from_json(value: object) -> Ledger | None:
    """As kvrelay's HTTP endpoint writes it. Raises ValueError for what is no ledger."""
    return None if value is None else read(Ledger, _listed(value))


def _listed(ledger: object) -> object:
    """With its phases in a list, which keeps their order, as a Ledger has them."""
    if not isinstance(ledger, dict) or not isinstance(ledger.get("phases"), dict):
        return ledger
    return ledger | {"phases": [list(one) for one in ledger["phases"].items()]}
