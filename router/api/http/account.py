"""How kvrelay served an answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvrelay.types.requests import Ledger
from kvrelay.wire.inference import GenerateResponse

Json = dict[str, Any]


def account(answers: Sequence[GenerateResponse]) -> Json | list[Json]:
    """Returns path, reason and ledger of the answer, or a list of them for several choices."""
    found = [
        {
            "request_id": one.request_id,
            "path": one.path,
            "why": one.why,
            "ledger": _ledger(one.ledger),
        }
        for one in answers
    ]
    return found[0] if len(found) == 1 else found


def _ledger(ledger: Ledger | None) -> Json | None:
    if ledger is None:
        return None
    attempts = [asdict(one) | {"phases": dict(one.phases)} for one in ledger.attempts]
    return asdict(ledger) | {"phases": dict(ledger.phases), "attempts": attempts}
