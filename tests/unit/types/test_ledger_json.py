from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.loadtest.report.row_json import ledger_from_json
from kvrelay.types.ledger_json import ledger_to_json, phases_as_lists
from kvrelay.types.requests import Attempt, Fetch, Handoff, Ledger

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SECONDS = st.floats(0, 1e6)
PATHS = st.sampled_from(["local", "disaggregated"])
COUNTS = st.integers(0, 2**31)
PHASES = st.dictionaries(TEXT, SECONDS, max_size=5).map(lambda found: tuple(found.items()))
ATTEMPTS = st.builds(Attempt, PATHS, TEXT, TEXT, TEXT, TEXT, phases=PHASES)
LEDGERS = st.builds(
    Ledger,
    phases=PHASES,
    ttft_seconds=SECONDS,
    second_token_gap_seconds=SECONDS,
    decode_seconds=SECONDS,
    e2e_seconds=SECONDS,
    handoff=st.none()
    | st.builds(Handoff, TEXT, COUNTS, COUNTS, COUNTS, COUNTS, SECONDS, SECONDS, TEXT),
    attempts=st.lists(ATTEMPTS, max_size=3).map(tuple),
    fetch=st.none() | st.builds(Fetch, TEXT, COUNTS, SECONDS),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["phases", "attempts", "x"]), inner, max_size=3)
    ),
)


@given(LEDGERS)
def test_ledgers_survive_json(ledger: Ledger) -> None:
    assert ledger_from_json(json.loads(json.dumps(ledger_to_json(ledger)))) == ledger


@given(JSON)
def test_any_document_can_be_converted(document: object) -> None:
    phases_as_lists(document)
