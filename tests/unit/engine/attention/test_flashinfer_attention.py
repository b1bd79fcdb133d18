"""How flashinfer is asked: against a stand-in that keeps its rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import flashinfer_stand_in
from support.graph_stand_ins import Programs, cuda_forward_runner

from kvrelay.engine.attention import flashinfer_attention
from kvrelay.engine.attention.flashinfer_attention import (
    DoesNotFit,
    FlashInfer,
    Pages,
    Room,
    _workspace_bytes,
)
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.step_input import Part
from kvrelay.types.kv_layout import KvLayout, LayerKv


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    flashinfer_stand_in.install(monkeypatch)
    return flashinfer_stand_in.MADE


@pytest.mark.parametrize(("architecture", "kinds"), [("llama", 1), ("mistral", 1), ("gemma2", 2)])
def test_there_is_a_wrapper_for_each_kind_of_attention_and_each_captured_size(
    architecture: str, kinds: int, stand_in: list[Any], tiny_model: Callable[[str], Path]
) -> None:
    cuda_forward_runner(tiny_model(architecture), Programs(), capture=4)
    assert len(stand_in) == kinds * (1 + len([4, 2, 1]))
    assert all(one.plans > 1 for one in stand_in)


def test_more_query_heads_than_there_is_room_for(
    stand_in: list[Any], tiny_model: Callable[[str], Path]
) -> None:
    def small(kv: KvPool) -> FlashInfer:
        return FlashInfer(kv, Room(query_heads=2, processors=4, sequences=8, blocks=256))

    with pytest.raises(DoesNotFit, match="a layer has 4 query heads, and the configuration has 2"):
        cuda_forward_runner(tiny_model("llama"), Programs(), small)


@pytest.mark.parametrize(
    ("layer", "dtype", "reason"),
    [
        (LayerKv(2, 64, 64), "float32", "KV in float16 and bfloat16, and the model has float32"),
        (LayerKv(2, 64, 64), "int8", "KV in float16 and bfloat16, and the model has int8"),
        (
            LayerKv(2, 96, 96),
            "bfloat16",
            r"head dimensions \(64, 128, 256\), and the model has 96 and 96",
        ),
        (
            LayerKv(2, 128, 64),
            "bfloat16",
            r"head dimensions \(64, 128, 256\), and the model has 128 and 64",
        ),
        (
            LayerKv(1, 64, 64),
            "bfloat16",
            "40 query heads share 1 KV heads; flashinfer allows at most 16",
        ),
        (LayerKv(8, 64, 64), "bfloat16", "flashinfer is not installed"),
    ],
)
def test_what_does_not_fit(
    layer: LayerKv, dtype: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_attention.importlib.util, "find_spec", lambda name: None)
    kv = KvPool(KvLayout((layer,), 16, dtype), 4)
    with pytest.raises(DoesNotFit, match=reason):
        FlashInfer(kv, Room(query_heads=40, processors=4, sequences=8, blocks=8))


def test_pages_of_sequences() -> None:
    parts = [Part(0, 3, 6, [5, 9, 2, 4]), Part(3, 1, 3, range(7, 9)), Part(4, 8, 0, [1, 3])]
    pages = Pages.of(parts, 4, torch.device("cpu"))
    assert pages.qo_indptr.tolist() == [0, 3, 4, 12]
    assert pages.kv_indptr.tolist() == [0, 3, 4, 6]
    assert pages.indices.tolist() == [5, 9, 2, 7, 1, 3]
    assert pages.last_page_len.tolist() == [1, 4, 4]


@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("kv_heads", [1, 8, 40])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("processors", [20, 132])
def test_the_workspace_holds_what_a_plan_asks_for(
    group: int, kv_heads: int, dim: int, processors: int
) -> None:
    """Of partial sums in float32, in tiles as flashinfer's scheduler counts and sizes them."""
    heads = group * kv_heads
    room = Room(query_heads=heads, processors=processors, sequences=256, blocks=1)
    found = _workspace_bytes(LayerKv(kv_heads, dim, dim), room)
    at_once = 2 * processors // kv_heads
    for sequences in (1, 8, 256):  # recorded: one row each
        tiles = max(at_once, -(-sequences * group // 16) + sequences - 1)
        assert found >= heads * tiles * 16 * (dim + 1) * 4
    rows = 128 if dim < 256 else 64
    assert found >= heads * at_once * rows * (dim + 1) * 4
