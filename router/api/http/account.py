"""How kvrelay served an answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.types.ledger_json import ledger_to_json
from kvrelay.wire.inference import GenerateResponse

Json = dict[str, Any]


def account(answers: Sequence[GenerateResponse]) -> Json | list[Json]:
    """Returns path, reason and ledger of the answer, or a list of them for several choices."""
    found = [
        {
            "request_id": one.request_id,
            "path": one.path,
            "why": one.why,
            "ledger": None if one.ledger is None else ledger_to_json(one.ledger),
        }
        for one in answers
    ]
    return found[0] if len(found) == 1 else found
