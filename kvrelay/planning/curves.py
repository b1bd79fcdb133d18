"""The curves of a plan's page: KV, contexts, steps and hand-offs over their sizes. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvrelay.planning.handoff import hand_off
from kvrelay.planning.plan import Plan
from kvrelay.planning.sizing.capacity import MOST, latency_context, longest_context

Points = list[list[float]]
_CONTEXTS = [2**power for power in range(9, 18)]
_USERS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
_BATCHES = [2**power for power in range(11)]
_PROMPTS = [2**power for power in range(6, 18)]
_DTYPES = ("bf16", "int8", "int4")
# Tokens of a sequence in a decode batch.
_CONTEXT = 2048


def plan_curves(plan: Plan) -> dict[str, Any]:
    """Returns points [x, y] by name. Bytes are in GB, times in ms, rates in TFLOP/s."""
    shape = plan.question.model.shape
    longest = shape.max_position or _CONTEXTS[-1]
    roofline = plan.roofline
    itl_s, chunk = plan.question.slo.itl_s, plan.question.chunk_tokens
    kept = plan.kv.on(plan.devices)
    context = plan.question.context or _CONTEXT
    handoffs = [
        hand_off(roofline, plan.kv, tokens, chunk, plan.handoff_rate) for tokens in _PROMPTS
    ]
    return {
        "kv": {
            dtype: [
                [tokens, replace(plan.kv, dtype=dtype).sequence_bytes(tokens) / 1e9]
                for tokens in _CONTEXTS
                if tokens <= 2 * longest
            ]
            for dtype in _DTYPES
        },
        "context_by_memory": _over_users(
            lambda users: longest_context(kept, plan.free_bytes, users)
        ),
        "context_by_latency": _over_users(lambda users: latency_context(roofline, users, itl_s)),
        "step_ms": [
            [batch, 1000 * roofline.decode_s(batch, batch * context)] for batch in _BATCHES
        ],
        "tokens_per_s": [
            [batch, batch / roofline.decode_s(batch, batch * context)] for batch in _BATCHES
        ],
        "roof": [
            [at, min(roofline.operations_per_s, at * roofline.bytes_per_s) / 1e12]
            for at in [roofline.ridge * 10.0 ** (power / 2) for power in range(-6, 5)]
        ],
        "prefill_steps": _attained(plan, "prefill"),
        "decode_steps": _attained(plan, "decode"),
        "prefill_ms": [[one.tokens, 1000 * one.prefill_s] for one in handoffs],
        "transfer_ms": [[one.tokens, 1000 * one.transfer_s] for one in handoffs],
        "exposed_ms": [[one.tokens, 1000 * one.exposed_s] for one in handoffs],
    }


def _over_users(context: Callable[[int], int]) -> Points:
    found = [[float(users), float(context(users))] for users in _USERS]
    return [point for point in found if 0 < point[1] < MOST]


def _attained(plan: Plan, phase: str) -> list[list[object]]:
    """Returns [op/B, TFLOP/s, description] of the steps of a phase."""
    return [
        [
            one.intensity,
            one.operations / one.seconds / 1e12,
            f"{one.phase}: {one.size:,} "
            + ("tokens" if phase == "prefill" else f"sequences of {one.context:,} tokens"),
        ]
        for one in plan.points
        if one.phase == phase
    ]
