"""Blocks come back from the staging memory as they went."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.errors import ModelRefused
from kvrelay.vllm_engine.block_copier import BlockCopier, layout_of

BLOCKS, STAGING, SIZE = 7, 5, 4


def caches(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Two layers with different heads, [blocks, heads, tokens, K and V]."""
    made = {}
    for name, heads in (("layer.0", 2), ("layer.1", 3)):
        values = torch.arange(BLOCKS * heads * SIZE * 6) % 200
        made[name] = values.view(BLOCKS, heads, SIZE, 6).to(dtype)
    return made


@given(
    st.data(),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    st.integers(1, min(BLOCKS, STAGING)),
)
def test_what_is_saved_and_loaded_is_the_same(
    data: st.DataObject, dtype: torch.dtype, count: int
) -> None:
    def some(total: int) -> list[int]:
        return data.draw(
            st.lists(st.integers(0, total - 1), min_size=count, max_size=count, unique=True)
        )

    sent, staging, arrived = some(BLOCKS), some(STAGING), some(BLOCKS)
    source, target = caches(dtype), {name: one * 0 for name, one in caches(dtype).items()}
    pool = KvPool(layout_of(source, BLOCKS, SIZE), STAGING)
    BlockCopier(source, pool).save(sent, staging)
    BlockCopier(target, pool).load(arrived, staging)
    for name, cache in target.items():
        assert torch.equal(cache[arrived], source[name][sent])
        others = [block for block in range(BLOCKS) if block not in arrived]
        assert not cache[others].any(), "other blocks are left alone"
    pool.close()


def test_the_layout_has_the_bytes_of_the_blocks() -> None:
    layout = layout_of(caches(torch.bfloat16), BLOCKS, SIZE)
    assert layout.block_bytes == sum(one[0].nbytes for one in caches(torch.bfloat16).values())
    assert layout.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({}, "KV cache of no KV"),
        (caches(torch.uint8), "KV cache of torch.uint8"),
        ({**caches(), "odd": torch.zeros(BLOCKS, 1, 3)}, "KV cache of layer odd"),
        ({"short": caches()["layer.0"][1:]}, "KV cache of layer short"),
        ({"split": caches()["layer.0"].view(2 * BLOCKS, -1)}, "KV cache of layer split"),
        ({"turned": caches()["layer.0"].transpose(1, 2)}, "KV cache of layer turned"),
        ({**caches(), "half": caches(torch.float16)["layer.0"]}, "float16, torch.float32"),
    ],
)
def test_other_memory_is_refused(broken: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ModelRefused, match=message):
        layout_of(broken, BLOCKS, SIZE)
