"""What tensor parallel devices keep, and the work of a decode step over latent vectors."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from kvrelay.errors import FailedPrecondition, InvalidArgument
from kvrelay.planning.device import Efficiency, find_device
from kvrelay.planning.kv_size import KV_DTYPES, KvSize
from kvrelay.planning.model_source import PlannedModel, published
from kvrelay.planning.model_table import find_model, model_names
from kvrelay.planning.plan import Question, make_plan
from kvrelay.planning.quantity import parse_bytes
from kvrelay.planning.roofline import Roofline
from kvrelay.planning.sizing.demand import LatencySlo

NAMES = st.sampled_from(model_names())
DEGREES = st.sampled_from([1, 2, 3, 4, 7, 8, 64])


def model(name: str) -> PlannedModel:
    found = find_model(name)
    assert found is not None
    return published(found, None)


def dealt_out(kv: KvSize, degree: int) -> float:
    """Deals the KV heads of each layer out to devices, one by one. A device without a head takes a
    copy, and all devices pad their shares to the largest.
    """
    total = 0.0
    for layer in kv.shape.layers:
        if layer.kv is None:
            continue
        scale = {"int8": 2.0, "int4": 2.0}.get(kv.dtype, 0.0)
        each = KV_DTYPES[kv.dtype]
        if layer.kind == "latent" and (kv.form == "compact" or degree == 1):
            total += sum(layer.latent * each + scale for _ in range(degree))
            continue
        devices = [0] * degree
        for head in range(layer.kv.kv_heads):
            devices[head % degree] += 1
        head_bytes = (layer.kv.k_dim + layer.kv.v_dim) * each + 2 * scale
        total += sum(max(devices) * head_bytes for _ in devices)
    return total


@given(NAMES, DEGREES, st.sampled_from(["native", "compact"]), st.sampled_from(list(KV_DTYPES)))
def test_devices_keep_whole_heads_and_whole_latent_vectors(
    name: str, degree: int, form: Any, dtype: str
) -> None:
    kv = KvSize(model(name).shape, dtype, form)
    assert math.isclose(kv.on(degree).bytes_per_token, dealt_out(kv, degree))
    assert kv.on(degree).on(1) == kv


@given(NAMES, st.sampled_from([1, 2, 4, 8, 64]), st.sampled_from(["native", "compact"]))
def test_a_plan_gives_users_only_what_the_copies_leave(name: str, degree: int, form: Any) -> None:
    question = Question(
        model(name), find_device("h200"), LatencySlo(2.0, 0.1), devices=degree, kv_form=form
    )
    try:
        plan = make_plan(question)
    except FailedPrecondition:
        reject()
    kept = plan.kv.on(degree)
    for wall in plan.walls:
        if wall.by_memory < 10**12:
            assert wall.users * kept.sequence_bytes(wall.by_memory) <= plan.free_bytes * (1 + 1e-9)
    told = any("keep copies" in note for note in plan.notes)
    expands = form == "native" and any(one.kind == "latent" for one in kept.shape.layers)
    assert told == (kept.bytes_per_token > plan.kv.bytes_per_token and not expands)
    assert any("expanded K and V" in note for note in plan.notes) == (expands and degree > 1)


def roofline(name: str, form: Any, degree: int = 1) -> Roofline:
    found = model(name)
    kv = KvSize(found.shape, "bf16", form).on(degree)
    return Roofline(found.memory, kv, find_device("h100"), Efficiency(), degree)


def test_a_decode_step_over_latent_vectors_does_the_absorbed_products() -> None:
    """DeepSeek-V2, section 2.1.2: 128 heads, each with a query of 512 + 64 values and a sum of 512
    values per token, in 61 layers.
    """
    for form in ("compact", "native"):
        _, attention = roofline("deepseek-v3", form).decode_parts(1, 1000)
        assert attention.operations == 2 * 61 * 128 * (576 + 512) * 1000
    # On several devices kvrelay's engine expands the vectors, each device those of its heads.
    _, attention = roofline("deepseek-v3", "native", 8).decode_parts(1, 1000)
    assert attention.operations == 2 * 61 * 128 * (192 + 128) * 1000


def test_weights_in_fp8_do_not_speed_the_attention_up() -> None:
    found = roofline("deepseek-v3", "compact", 8)
    bf16 = found.device.rate("bf16") * found.efficiency.compute * 8
    assert found.attention_operations_per_s == bf16 < found.operations_per_s
    batch, context = 64, 32_768
    matrices, attention = found.decode_parts(batch, batch * context)
    assert found.decode_s(batch, batch * context) >= found.seconds(matrices) + (
        attention.operations / bf16
    )


@given(
    st.floats(1e-12, 1e17) | st.floats(1e19, 1e30),
    st.sampled_from(["", "B", "kB", "GB", "GiB", "PB/s"]),
)
def test_a_size_is_from_one_byte_to_the_largest_or_refused(number: float, unit: str) -> None:
    factor = {"": 1e9, "B": 1, "kB": 1e3, "GB": 1e9, "GiB": 2**30, "PB/s": 1e15}[unit]
    text = f"{number:.6f}"
    size = float(text) * factor
    # No number has more than 18 digits before the point.
    if 1 <= size <= 1e18 and number <= 1e17:
        assert math.isclose(parse_bytes(f"{text}{unit}", "--memory"), size)
    else:
        with pytest.raises(InvalidArgument, match="from 1 B to 1,000 PB"):
            parse_bytes(f"{text}{unit}", "--memory")
