"""A plan as plain data for JSON, with units in the names. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvrelay.planning.kv_size import KV_DTYPES, KvSize
from kvrelay.planning.plan import Plan
from kvrelay.planning.references import ASSUMPTIONS, REFERENCES
from kvrelay.planning.sizing.capacity import MOST

FORMAT = "kvrelay-plan-1"
Json = dict[str, Any]


def plan_to_json(plan: Plan) -> Json:
    """Returns the plan as plain data. Numbers are bytes, seconds and tokens, as the names say. A
    limit that does not exist is null.
    """
    question, model = plan.question, plan.question.model
    return {
        "format": FORMAT,
        "model": {
            "name": model.name,
            "source": model.source,
            "parameters": round(model.parameters),
            "active_parameters": round(model.active_parameters),
            "layers": len(model.shape.layers),
            "attention": plan.kv.kinds,
            "max_tokens": model.shape.max_position or None,
        },
        "device": question.device.to_json(),
        "devices": plan.devices,
        "efficiency": asdict(question.efficiency),
        "kv": _kv(plan),
        "memory": {
            "usable_bytes": plan.usable_bytes,
            "weight_bytes": plan.weight_bytes,
            "weight_dtype": model.memory.weight_dtype,
            "weight_source": model.memory.source,
            "activation_bytes": plan.activation_bytes,
            "kv_bytes": plan.free_bytes,
            "draft_weight_bytes": (
                0 if question.draft is None else question.draft.memory.weight_bytes
            ),
            "draft_kv_bytes": plan.draft_kv_bytes,
        },
        "longest_context": [
            {
                "users": wall.users,
                "tokens": _bounded(wall.context),
                "limit": wall.limit,
                "tokens_by_memory": _bounded(wall.by_memory),
                "tokens_by_latency": _bounded(wall.by_latency),
                "tokens_by_model": wall.by_model or None,
            }
            for wall in plan.walls
        ],
        "most_users": [
            {
                "context_tokens": one.context,
                "users": _bounded(min(one.by_memory, one.by_latency)),
                "users_by_memory": _bounded(one.by_memory),
                "users_by_latency": _bounded(one.by_latency),
            }
            for one in plan.users
        ],
        "itl_seconds": question.slo.itl_s,
        "full_memory_step_seconds": plan.full_step_s,
        "roofline": {
            "operations_per_second": plan.roofline.operations_per_s,
            "bytes_per_second": plan.roofline.bytes_per_s,
            "ridge_operations_per_byte": plan.roofline.ridge,
            "steps": [asdict(point) for point in plan.points],
        },
        "handoff": {
            "bytes_per_second": plan.handoff_rate,
            "chunk_tokens": question.chunk_tokens,
            "prompts": [asdict(one) | {"hidden_share": one.hidden_share} for one in plan.handoffs],
        },
        "step_costs": plan.step_costs.to_json(),
        "cluster": _cluster(plan),
        "notes": list(plan.notes),
        "references": REFERENCES,
        "assumptions": ASSUMPTIONS,
    }


def _kv(plan: Plan) -> Json:
    shape = plan.question.model.shape
    native = {dtype: KvSize(shape, dtype, "native").bytes_per_token for dtype in KV_DTYPES}
    compact = {dtype: KvSize(shape, dtype, "compact").bytes_per_token for dtype in KV_DTYPES}
    return {
        "dtype": plan.kv.dtype,
        "form": plan.kv.form,
        "bytes_per_token": plan.kv.bytes_per_token,
        "bytes_per_token_of_a_worker": plan.kv.on(plan.devices).bytes_per_token,
        "bytes_per_token_beyond_windows": plan.kv.bytes_per_old_token,
        "formula": plan.kv.formula,
        "native_bytes_per_token": native,
        "compact_bytes_per_token": compact,
    }


def _cluster(plan: Plan) -> Json | None:
    if plan.advice is None or plan.demand is None:
        return None
    advice, work = plan.advice, plan.demand.workload
    ratio = None
    if advice.prefill is not None and advice.decode is not None:
        ratio = advice.prefill.workers / advice.decode.workers
    return {
        "workload": {
            "source": work.source,
            "rate_per_second": work.rate,
            "mean_rate_per_second": work.mean_rate,
            "arrival_scv": work.arrival_scv,
            "mean_prompt_tokens": work.mean_prompt,
            "mean_answer_tokens": work.mean_answer,
            "longest_tokens": work.longest,
            "cached_share": work.cached_share,
        },
        "slo": asdict(plan.demand.slo),
        "disaggregate": advice.disaggregate,
        "verdict": advice.verdict,
        "bottleneck": advice.bottleneck,
        "devices": advice.chosen_devices,
        "disaggregated": {
            "devices": advice.devices,
            "prefill": advice.prefill and asdict(advice.prefill),
            "decode": advice.decode and asdict(advice.decode),
            "workers_ratio": ratio,
            "impossible": advice.no_disaggregation or None,
        },
        "colocated": {
            "devices": advice.colocated and advice.colocated.devices,
            "size": advice.colocated and asdict(advice.colocated),
            "impossible": advice.no_colocation or None,
        },
        "cost": plan.cost and asdict(plan.cost),
    }


def _bounded(number: int) -> int | None:
    return None if number >= MOST else number
