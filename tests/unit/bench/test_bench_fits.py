from __future__ import annotations

import pytest

from kvrelay.bench.cases import DecodeCase, PrefillCase
from kvrelay.bench.cost import ModelCost
from kvrelay.bench.engine_bench import Measured
from kvrelay.bench.regression import decode_fit, prefill_growth

COST = ModelCost(
    16, 16, 4, 64, body=10**8, head=10**7, max_model_len=8192, vocab_size=8192, dtype="bfloat16"
)
BATCHES, CONTEXTS = (1, 4, 16, 32), (128, 1024)


def decode(batch: int, context: int, seconds: float) -> Measured:
    return Measured(DecodeCase(batch, context), {"ours": (seconds,)})


def line(batch: int, context: int) -> float:
    return 0.02 + 0.001 * batch + 1e-10 * batch * context * COST.kv_token_bytes()


def test_a_line_is_found_again() -> None:
    fit = decode_fit([decode(b, c, line(b, c)) for b in BATCHES for c in CONTEXTS], "ours", COST)
    assert fit is not None
    assert fit.step_seconds == pytest.approx(0.02)
    assert fit.sequence_seconds == pytest.approx(0.001)
    assert fit.kv_byte_seconds == pytest.approx(1e-10)
    assert fit.r2 == pytest.approx(1)


def test_what_is_not_on_a_line_lowers_r2() -> None:
    bent = [decode(b, c, line(b, c) + 0.02 * (b == 4)) for b in BATCHES for c in CONTEXTS]
    fit = decode_fit(bent, "ours", COST)
    assert fit is not None
    assert 0 < fit.r2 < 0.95


def test_one_context_leaves_the_line_open() -> None:
    assert decode_fit([decode(b, 128, line(b, 128)) for b in BATCHES], "ours", COST) is None


def test_three_points_prove_nothing() -> None:
    assert (
        decode_fit(
            [decode(b, c, line(b, c)) for b, c in ((1, 128), (4, 128), (4, 1024))], "ours", COST
        )
        is None
    )


def test_growth_is_time_per_token_by_time_per_token() -> None:
    times = {512: 1.0, 1024: 2.0, 4096: 12.0}
    results = [
        Measured(PrefillCase(tokens), {"ours": (seconds,)}) for tokens, seconds in times.items()
    ]
    assert prefill_growth(results, "ours") == pytest.approx(1.5)
    assert prefill_growth(results[:2], "ours") is None
