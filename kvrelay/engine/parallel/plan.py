"""Checks, before a model is loaded, that a number of ranks can share it."""

from __future__ import annotations

import math

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvrelay.engine.model.checkpoint import Checkpoint
from kvrelay.errors import ModelRefused

_KEYS = ("k_proj", "qkv_proj", "query_key_value")


def check_degree(checkpoint: Checkpoint, degree: int) -> None:
    """Raises ModelRefused unless transformers has a plan that gives each of `degree` ranks the same
    number of KV heads.
    """
    try:
        config = AutoConfig.from_pretrained(str(checkpoint.folder), local_files_only=True)
        # Shapes without memory.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    # A configuration can make transformers raise any exception.
    except Exception as error:
        raise ModelRefused(
            f"{checkpoint.folder}: transformers cannot load it: {error!s:.1000}"
        ) from error
    kind = type(model).__name__
    plan: dict[str, str] = model.tp_plan or {}
    if not plan:
        raise ModelRefused(
            f"{checkpoint.folder}: transformers has no tensor parallel plan for {kind}, which "
            f"tensor_parallel {degree} requires; set tensor_parallel: 1"
        )
    styles = {style for name, style in plan.items() if name.rpartition(".")[2] in _KEYS}
    if styles != {"colwise"}:
        found = (
            f"gathers its heads ({', '.join(sorted(styles))})"
            if styles
            else "leaves attention whole"
        )
        raise ModelRefused(
            f"{checkpoint.folder}: tensor_parallel {degree} is not supported for {kind}: the "
            f"plan of transformers {found}, so each rank would keep the whole KV cache; set "
            "tensor_parallel: 1"
        )
    text = config.get_text_config()
    heads = math.gcd(text.num_attention_heads, text.num_key_value_heads or text.num_attention_heads)
    if heads % degree:
        allowed = ", ".join(str(ranks) for ranks in range(1, heads + 1) if heads % ranks == 0)
        raise ModelRefused(
            f"{checkpoint.folder}: tensor_parallel {degree} does not divide "
            f"{text.num_attention_heads} attention heads "
            f"and {text.num_key_value_heads} KV heads; allowed are {allowed}"
        )
