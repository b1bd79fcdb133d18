"""Compares a model's logits on paged attention with those on transformers' own attention, over a
few tokens, before the model serves.

The check reads the weights about five times: twice for the reference and three times for the
compared steps. It allocates KV for 32 tokens, and no second copy of the weights.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvrelay.engine.attention import paged_attention
from kvrelay.engine.base.kv_memory import TORCH_DTYPE, KvPool
from kvrelay.engine.base.step_input import Part, Step
from kvrelay.engine.forward.check_steps import relative_errors
from kvrelay.engine.forward.torch_forward import TorchForward
from kvrelay.errors import ModelRefused
from kvrelay.planning.quantity import plain
from kvrelay.types.kv_layout import KvLayout, LayerKv

# Tokens of each sequence.
LENGTH = 8
_BLOCK = 4  # tokens
# Allowed multiple of the difference that one rounding of the input makes.
_NOISE_TIMES = 4
# Largest relative difference of a row, whatever rounding explains. A row further away is wrong.
_UNLIKE = 0.5
# transformers' own attention; the check uses the first kind that runs the model.
_REFERENCES = ("eager", "sdpa")

# (sequence, position) of each row of logits.
_Rows = list[tuple[int, int]]


def check_against_own_attention(
    model: PreTrainedModel, layers: tuple[LayerKv, ...], dtype: str
) -> None:
    """Raises ModelRefused unless both kinds of attention give the same logits, in several chunks
    and batches, up to rounding.

    In float32 each row of logits has to agree. In 16 bits the median row has to agree: where a
    router of experts chooses between nearly equal experts, rounding alone changes a token's
    experts, while an error in attention shows in most rows. If the rows differ by more than the
    dtype explains, the model runs once more with its input rounded differently, to measure how much
    rounding changes the logits of this model.
    """
    kind = type(model).__name__
    rounding = _coarser(TORCH_DTYPE[dtype], model.dtype)
    tokens = _token_ids(model.config, model.device)
    wanted = _reference(model, tokens)
    if not wanted.isfinite().all():
        raise ModelRefused(
            f"{kind} computes logits that are not finite; its weights are damaged or overflow "
            f"{dtype}"
        )
    parted = _distance(_paged(model, layers, dtype, tokens.tolist()), wanted, rounding)
    bound = _tolerance(rounding)
    if parted <= bound:
        return
    if rounding != torch.float32:
        noise = _distance(_reference(model, tokens, rounded=True), wanted, rounding)
        bound = max(bound, _NOISE_TIMES * noise)
    # NaN fails the comparison too.
    if not parted <= min(bound, _UNLIKE):
        raise ModelRefused(
            f"{kind} computes other logits with paged attention than with transformers: "
            f"{LENGTH} tokens differ by {plain(parted, 2)} of their norm, and rounding explains "
            f"{plain(bound, 2)}"
        )


def _coarser(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The coarser of two dtypes if `other` is one that a model computes in; else `dtype`."""
    if other not in (torch.float32, torch.bfloat16, torch.float16):
        return dtype
    return max(dtype, other, key=lambda candidate: torch.finfo(candidate).eps)


def _token_ids(config: PreTrainedConfig, device: torch.device) -> torch.Tensor:
    """[2, LENGTH] ordinary token ids. Ids that the configuration names, such as padding or image
    tokens, are left out.
    """
    vocab_size = config.get_text_config().vocab_size
    named: set[int] = set()
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            if name.endswith(("_token_id", "_token_index")):
                named.update(
                    token_id
                    for token_id in (value if isinstance(value, list) else [value])
                    if isinstance(token_id, int)
                )
    step = max(1, vocab_size // (2 * LENGTH + len(named) + 1))
    free = [id_ for id_ in range(step // 2, vocab_size, step) if id_ not in named] or [0]
    ids = [free[i % len(free)] for i in range(2 * LENGTH)]
    return torch.tensor(ids, device=device).view(2, LENGTH)


@torch.inference_mode()
def _reference(
    model: PreTrainedModel, tokens: torch.Tensor, *, rounded: bool = False
) -> torch.Tensor:
    """Logits [2, LENGTH, vocab_size] of the model's own code. With `rounded`, its embeddings are
    off by one rounding.

    Raises ModelRefused if the model runs on none of transformers' own kinds of attention.
    """
    kind = type(model).__name__
    hook = None
    if rounded:
        hook = model.get_input_embeddings().register_forward_hook(_one_rounding_off)
    error: Exception | None = None
    try:
        for name in _REFERENCES:
            try:
                model.set_attn_implementation(name)
                logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
                return logits
            except Exception as reason:  # noqa: BLE001 - whatever a model's own code can raise
                error = error or reason
    finally:
        model.set_attn_implementation(paged_attention.NAME)
        if hook is not None:
            hook.remove()
    raise ModelRefused(f"{kind} fails with the attention of transformers: {error!r:.300}")


def _one_rounding_off(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    signs = torch.ones_like(output)
    signs[..., ::2] = -1
    # Moves each value to the next one of its dtype, up or down.
    return output * (1 + signs * torch.finfo(output.dtype).eps)


@torch.inference_mode()
def _paged(
    model: PreTrainedModel, layers: tuple[LayerKv, ...], dtype: str, tokens: list[list[int]]
) -> torch.Tensor:
    """The logits from three steps on paged KV: first chunks of both sequences together, then chunks
    beside a decode step.
    """
    blocks_each = LENGTH // _BLOCK
    pool = KvPool(KvLayout(layers, _BLOCK, dtype), 2 * blocks_each, str(model.device))
    tables = [[0, 3], [2, 1]]
    logits: dict[tuple[int, int], torch.Tensor] = {}
    try:
        forward = TorchForward(model, pool)
        for ends in _STEPS:
            step, rows = _step(tokens, tables, ends)
            out = forward(step)
            logits |= zip(rows, out, strict=True)
    finally:
        pool.close()
    return torch.stack([torch.stack([logits[i, at] for at in range(LENGTH)]) for i in range(2)])


# Tokens [start, end) of each sequence.
_STEPS = (((0, 3), (0, 5)), ((3, 7), (5, 6)), ((7, 8), (6, 8)))


def _step(
    tokens: list[list[int]], tables: list[list[int]], ends: tuple[tuple[int, int], tuple[int, int]]
) -> tuple[Step, _Rows]:
    ids: list[int] = []
    parts: list[Part] = []
    rows: _Rows = []
    for sequence, (start, end) in enumerate(ends):
        parts.append(Part(len(ids), end - start, start, tables[sequence]))
        ids += tokens[sequence][start:end]
        rows += [(sequence, position) for position in range(start, end)]
    # In reverse, to check that the model returns the requested rows in the requested order.
    order = range(len(ids))[::-1]
    return Step(ids, parts, order), [rows[i] for i in order]


def _tolerance(dtype: torch.dtype) -> float:
    """The relative error in the 2-norm of a row of logits that rounding in `dtype` explains, for
    deep models too.
    """
    return float(max(1e-3, 16 * torch.finfo(dtype).eps))


def _distance(found: torch.Tensor, wanted: torch.Tensor, rounding: torch.dtype) -> float:
    """The 2-norm of a row's difference relative to the row's own: the largest in float32, the
    median in 16 bits.
    """
    rows = relative_errors(found, wanted)
    return float(
        rows.max() if rounding == torch.float32 or not rows.isfinite().all() else rows.median()
    )
