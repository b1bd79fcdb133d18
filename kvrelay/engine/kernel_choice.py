"""Decides whether a model runs on the native kernels."""

from __future__ import annotations

from kvrelay.compiler.compiled import NativeUnavailable
from kvrelay.engine.base.kv_memory import TORCH_DTYPE
from kvrelay.engine.model.loader import LoadedModel
from kvrelay.engine.native.batch import PagedBatch
from kvrelay.engine.native.ops import check
from kvrelay.types.kv_layout import KvLayout


def why_without_kernels(loaded: LoadedModel, layout: KvLayout) -> str:
    """The reason why the native kernels cannot be used; empty if they can. May compile them."""
    if loaded.ranks > 1:
        return (
            f"{loaded.ranks} ranks share the model, and transformers' plans for that are for "
            f"torch's operators"
        )
    if loaded.model.device.type != "cpu":
        return f"they are for CPUs, and the model is on {loaded.model.device.type}"
    dtype = TORCH_DTYPE[loaded.kv_dtype]
    if loaded.dtype != loaded.kv_dtype or not PagedBatch.suits(layout, dtype):
        return (
            f"they do not fit {loaded.dtype} weights and {layout.dtype} KV in blocks of "
            f"{layout.block_size} tokens"
        )
    try:
        check()
    except NativeUnavailable as error:
        return str(error)
    return ""
