"""Ledgers as JSON: phases are objects, {name: seconds}, in the order in which they took place."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvrelay.types.requests import Ledger


def ledger_to_json(ledger: Ledger) -> dict[str, Any]:
    """Returns the ledger as plain data for JSON."""
    attempts = [asdict(one) | {"phases": dict(one.phases)} for one in ledger.attempts]
    return asdict(ledger) | {"phases": dict(ledger.phases), "attempts": attempts}


def phases_as_lists(document: object) -> object:
    """Converts the phases of a ledger from JSON, and those of its attempts, to the ordered lists
    that a Ledger has. Leaves anything else as it is.
    """
    if not isinstance(document, dict):
        return document
    found = _listed(document)
    attempts = document.get("attempts")
    if isinstance(attempts, list):
        found["attempts"] = [_listed(one) if isinstance(one, dict) else one for one in attempts]
    return found


def _listed(document: dict[str, Any]) -> dict[str, Any]:
    phases = document.get("phases")
    if not isinstance(phases, dict):
        return dict(document)
    return document | {"phases": [list(one) for one in phases.items()]}
