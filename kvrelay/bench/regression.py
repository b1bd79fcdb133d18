"""Regressions: how the times grow with batch, context and prompt length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.bench.cases import DecodeCase, PrefillCase
from kvrelay.bench.cost import ModelCost
from kvrelay.bench.engine_bench import Measured


@dataclass(frozen=True, slots=True)
class DecodeFit:
    """The seconds of a step as step_seconds + sequence_seconds · batch + kv_byte_seconds · bytes of
    KV, fitted by least squares.

    r2 is the share of the variance that the fit explains.
    """

    step_seconds: float
    sequence_seconds: float
    kv_byte_seconds: float
    r2: float


def decode_fit(results: Sequence[Measured], engine: str, cost: ModelCost) -> DecodeFit | None:
    """Fits the decode cases of one engine. Returns None if the cases do not determine the fit,
    which takes two batches, two contexts, and one case more.
    """
    points = [
        (result.case, result.median(engine))
        for result in results
        if isinstance(result.case, DecodeCase)
    ]
    x = np.array(
        [[1, case.batch, case.batch * case.context * cost.kv_token_bytes()] for case, _ in points],
        float,
    )
    y = np.array([seconds for _, seconds in points])
    scale = x.max(axis=0)
    if len(points) <= x.shape[-1] or np.linalg.matrix_rank(x / scale) < x.shape[-1]:
        return None
    solution = np.linalg.lstsq(x / scale, y, rcond=None)[0] / scale
    spread = ((y - y.mean()) ** 2).sum()
    r2 = 1 - ((y - x @ solution) ** 2).sum() / spread if spread else 1.0
    step, sequence, kv_byte = map(float, solution)
    return DecodeFit(step, sequence, kv_byte, float(r2))


def prefill_growth(
    results: Sequence[Measured], engine: str, long: int = 4096, short: int = 512
) -> float | None:
    """Returns the time per token in a prompt of `long` tokens, relative to a prompt of `short`
    tokens. Returns None if one of the two is missing.
    """
    times = {
        one.case.tokens: one.median(engine) for one in results if isinstance(one.case, PrefillCase)
    }
    if long not in times or short not in times:
        return None
    return (times[long] / long) / (times[short] / short)
