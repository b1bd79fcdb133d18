"""What workers report of themselves, whatever it is."""

from __future__ import annotations

import sys
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st
from support.fake_worker import worker_info

COUNTS = st.integers(0, 2**40)


@given(COUNTS, COUNTS, st.floats(0, allow_infinity=False))
@example(40, 4, sys.float_info.max)
def test_tokens_are_counted_in_tokens(tokens: int, window: int, share: float) -> None:
    worker = replace(
        worker_info("decode-0", "decode", "127.0.0.1:1"),
        window_tokens=window,
        windowed_share=share,
    )
    counted = worker.counted_tokens(tokens)
    assert min(tokens, window) <= counted <= tokens or counted == tokens
