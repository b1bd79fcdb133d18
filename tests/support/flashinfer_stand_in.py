"""What stands for flashinfer where there is no GPU: one class, with its rules, computed key by key
with torch.

A recordable one (`use_cuda_graph`) reads nothing in `run` but the buffers that it was given, as
kernels do.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from kvrelay.engine.attention import flashinfer_attention

MAX_KEYS = 64  # of a sequence
MADE: list[BatchPrefillWithPagedKVCacheWrapper] = []


def install(patch: pytest.MonkeyPatch) -> None:
    """Has it imported as flashinfer, with kernels for the models of the tests."""
    module = sys.modules[__name__]
    patch.setitem(sys.modules, "flashinfer", module)
    patch.setattr(module, "MADE", [])
    patch.setattr(flashinfer_attention, "DTYPES", ("float32",))
    patch.setattr(flashinfer_attention, "HEAD_DIMS", tuple(range(4, 65)))


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert (kv_layout, backend) == ("NHD", "fa2")
        self.recordable = use_cuda_graph
        self.buffers = [
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        ]
        self.planned: dict[str, Any] = {}
        self.plans = 0
        MADE.append(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **options: Any,
    ) -> None:
        given = [qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
        assert all(one.dtype == torch.int32 and one.dim() == 1 for one in given)
        sequences, rows = len(qo_indptr) - 1, int(qo_indptr[-1])
        assert len(paged_kv_indptr) == sequences + 1
        assert len(paged_kv_last_page_len) == sequences
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        planned = {
            "heads": (num_qo_heads, num_kv_heads, head_dim_qk),
            "page_size": page_size,
            "rows": rows,
            **options,
        }
        if not self.recordable:
            self.buffers = [one.clone() for one in given]
        else:
            assert not self.plans or planned == self.planned, "what is in the graph cannot change"
            for buffer, one in zip(self.buffers, given, strict=True):
                assert buffer is not None
                assert len(buffer) == len(one) or (
                    one is paged_kv_indices and len(buffer) > len(one)
                )
                buffer[: len(one)].copy_(one)
        self.planned = planned
        self.plans += 1

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """q [T, Hq, D]; keys and values [pages, page_size, Hkv, D]."""
        planned = self.planned
        assert q.is_contiguous()
        assert q.shape[0] == planned["rows"]
        assert (q.dtype, paged_kv_cache[0].dtype) == (
            planned["q_data_type"],
            planned["kv_data_type"],
        )
        assert planned["causal"]
        qo_indptr, kv_indptr, indices, last_page_len = (
            one.long() for one in self.buffers if one is not None
        )
        pages, size, kv_heads, _ = paged_kv_cache[0].shape
        assert (q.shape[1], kv_heads, q.shape[2], size) == (*planned["heads"], planned["page_size"])
        row = torch.arange(q.shape[0])
        sequence = torch.searchsorted(qo_indptr[1:].contiguous(), row, right=True)
        length = (kv_indptr[sequence + 1] - kv_indptr[sequence] - 1) * size + last_page_len[
            sequence
        ]
        own = (length - qo_indptr[sequence + 1] + row)[:, None]  # the row's place in its sequence
        place = torch.arange(MAX_KEYS)[None, :]
        seen = place <= own
        if planned["window_left"] >= 0:
            seen = seen & (place >= own - planned["window_left"])
        page = (kv_indptr[sequence, None] + place // size).clamp(max=len(indices) - 1)
        slot = indices[page].clamp(0, pages - 1) * size + place % size
        keys, values = (one.flatten(0, 1)[slot] for one in paged_kv_cache)  # [T, S, Hkv, D]
        group = q.shape[1] // kv_heads
        keys, values = (
            torch.where(seen[..., None, None], one, 0).repeat_interleave(group, dim=2)
            for one in (keys, values)
        )
        scores = torch.einsum("thd,tshd->ths", q, keys) * planned["sm_scale"]
        cap = planned["logits_soft_cap"]
        if cap:
            scores = cap * torch.tanh(scores / cap)
        weights = scores.masked_fill(~seen[:, None, :], float("-inf")).softmax(-1)
        return out.copy_(torch.einsum("ths,tshd->thd", weights, values))
