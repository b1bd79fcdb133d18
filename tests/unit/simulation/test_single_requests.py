"""The times of a single request, computed by hand from the profile."""

from __future__ import annotations

from typing import Any

import pytest
from support import simulated

from kvrelay.loadtest.report.row import Row
from kvrelay.loadtest.workload import PlannedRequest
from kvrelay.simulation.scenario import Delays

DELAYS = Delays(request_s=0.003, message_s=0.002, step_s=0.0005)
COSTS = simulated.profile().costs
BLOCK = 32


def only(prompt: int, answer: int, prefillers: int, **config: Any) -> Row:
    """Returns the row of one request on an idle cluster."""
    tokens = tuple(number % simulated.VOCAB for number in range(prompt))
    sections = {"kv": {"memory": "64MiB", "block_size": BLOCK}} | config
    cluster = simulated.scenario(prefillers, 1, config=sections, delays=DELAYS)
    plan = [PlannedRequest(1.0, None, tokens, answer, 7)]
    (row,) = simulated.run(cluster, plan).rows
    assert row.ok
    return row


def bytes_s(tokens: int) -> float:
    """Seconds that the blocks of so many tokens take on the link."""
    return -(-tokens // BLOCK) * BLOCK * simulated.KV_TOKEN_BYTES * COSTS.handoff_byte_s


def decode_s(context: int) -> float:
    return COSTS.decode_s(1, context) + DELAYS.step_s


def test_a_disaggregated_request_of_one_chunk() -> None:
    row = only(300, 3, 1)
    assert row.path == "disaggregated"
    compute_s = COSTS.prefill_s(300) + DELAYS.step_s
    # Reserve, Reserved, Prefill, the first token, and the way to the client.
    assert row.ttft_s == pytest.approx(DELAYS.request_s + 5 * DELAYS.message_s + compute_s)
    handoff_s = bytes_s(300) + COSTS.handoff_base_s
    # The first token and the second take the same way to the router.
    assert row.itl_s == pytest.approx([handoff_s + decode_s(301), decode_s(302)])
    assert row.ledger is not None
    assert row.ledger.handoff is not None
    assert row.ledger.handoff.exposed_seconds == pytest.approx(handoff_s)
    assert row.ledger.handoff.bytes == 10 * BLOCK * simulated.KV_TOKEN_BYTES


def test_the_next_chunk_hides_the_hand_off_of_the_last() -> None:
    row = only(700, 2, 1, prefill={"chunk_tokens": 512})
    chunks_s = COSTS.prefill_s(512) + COSTS.prefill_s(188, 512) + 2 * DELAYS.step_s
    assert row.ttft_s == pytest.approx(DELAYS.request_s + 5 * DELAYS.message_s + chunks_s)
    # The first 512 tokens travel while the last 188 are computed.
    assert bytes_s(512) < COSTS.prefill_s(188, 512)
    assert row.itl_s == pytest.approx([bytes_s(188) + COSTS.handoff_base_s + decode_s(701)])


def test_a_local_request_is_computed_beside_the_batch() -> None:
    row = only(300, 3, 0, decode={"chunk_tokens": 256}, slo=None)
    assert row.path == "local"
    chunks_s = COSTS.prefill_s(256) + COSTS.prefill_s(44, 256) + 2 * DELAYS.step_s
    # RunLocal, the first token, and the way to the client.
    assert row.ttft_s == pytest.approx(DELAYS.request_s + 3 * DELAYS.message_s + chunks_s)
    assert row.itl_s == pytest.approx([decode_s(301), decode_s(302)])


def test_an_answer_of_one_token_has_no_hand_off() -> None:
    row = only(300, 1, 1)
    assert (row.itl_s, row.output_tokens) == ((), 1)
    assert row.ledger is not None
    assert row.ledger.handoff is None
