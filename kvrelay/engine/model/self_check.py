"""Holds a model on paged attention to itself on transformers' own attention, over a few tokens,
before it serves.

The check reads the weights about five times: twice for the reference and three times for the steps
that are compared. It allocates KV for 32 tokens, and no second copy of the weights.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvrelay.engine.attention import paged_attention as attention
from kvrelay.engine.base.kv_memory import TORCH_DTYPE, KvPool
from kvrelay.engine.base.step_input import Part, Step
from kvrelay.engine.forward.check_steps import tolerance
from kvrelay.engine.forward.torch_forward import TorchForward
from kvrelay.errors import ModelRefused
from kvrelay.types import KvLayout, LayerKv

LENGTH = 8  # tokens of each sequence
_BLOCK = 4  # tokens
_NOISE_TIMES = 4  # what rounding may add up to, beyond what one rounding of the input does
_UNLIKE = 0.5  # of its norm: a row that is further away is another row, whatever rounding explains
_NOTHING = 1e-30  # the norm of a row of zeros
_REFERENCES = ("eager", "sdpa")  # attention of transformers, the first that the model has

_Rows = list[tuple[int, int]]  # (sequence, position) of each row of logits


def check_against_own_attention(
    model: PreTrainedModel, layers: tuple[LayerKv, ...], dtype: str
) -> None:
    """Raises ModelRefused unless both give the same logits, in several chunks and batches, as
    closely as rounding allows.

    In float32 each row of logits has to agree. In 16 bits the median row has to: where a router of
    experts chooses between near equals, rounding alone changes a token's experts, and what is wrong
    with attention shows in most rows. Where they part further than the dtype explains, the model is
    run once more with its input rounded another way, to see how much of a difference rounding makes
    in this model.
    """
    kind = type(model).__name__
    rounding = _coarser(TORCH_DTYPE[dtype], model.dtype)
    tokens = _token_ids(model.config, model.device)
    wanted = _reference(model, tokens)
    if not wanted.isfinite().all():
        raise ModelRefused(
            f"{kind} gives logits that are no finite numbers: its weights are broken, or overflow "
            f"{dtype}"
        )
    parted = _distance(_paged(model, layers, dtype, tokens.tolist()), wanted, rounding)
    bound = tolerance(rounding)
    if parted <= bound:
        return
    if rounding != torch.float32:
        noise = _distance(_reference(model, tokens, rounded=True), wanted, rounding)
        bound = max(bound, _NOISE_TIMES * noise)
    if not parted <= min(bound, _UNLIKE):  # NaN included
        raise ModelRefused(
            f"{kind} gives other logits on paged attention than on transformers' own: {LENGTH} "
            f"tokens differ by {parted:.2g} of their norm, and rounding explains {bound:.2g}"
        )


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Of the two, if it is one that a model computes in; the first otherwise."""
    if other not in (torch.float32, torch.bfloat16, torch.float16):
        return one
    return max(one, other, key=lambda dtype: torch.finfo(dtype).eps)


def _token_ids(config: PreTrainedConfig, device: torch.device) -> torch.Tensor:
    """[2, LENGTH], of ordinary tokens: none that the configuration names, such as padding or an
    image's place.
    """
    vocab_size = config.get_text_config().vocab_size
    named: set[int] = set()
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            if name.endswith(("_token_id", "_token_index")):
                named.update(
                    one
                    for one in (value if isinstance(value, list) else [value])
                    if isinstance(one, int)
                )
    step = max(1, vocab_size // (2 * LENGTH + len(named) + 1))
    free = [id_ for id_ in range(step // 2, vocab_size, step) if id_ not in named] or [0]
    ids = [free[i % len(free)] for i in range(2 * LENGTH)]
    return torch.tensor(ids, device=device).view(2, LENGTH)


@torch.inference_mode()
def _reference(
    model: PreTrainedModel, tokens: torch.Tensor, *, rounded: bool = False
) -> torch.Tensor:
    """Logits [2, LENGTH, vocab_size] of the model's own code; with `rounded` from embeddings that
    are one rounding off.

    Raises ModelRefused.
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
        model.set_attn_implementation(attention.NAME)
        if hook is not None:
            hook.remove()
    raise ModelRefused(f"{kind} does not run on transformers' own attention: {error!r:.300}")


def _one_rounding_off(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    signs = torch.ones_like(output)
    signs[..., ::2] = -1
    # To the next value of its dtype, up or down
    return output * (1 + signs * torch.finfo(output.dtype).eps)


@torch.inference_mode()
def _paged(
    model: PreTrainedModel, layers: tuple[LayerKv, ...], dtype: str, tokens: list[list[int]]
) -> torch.Tensor:
    """The same logits from three steps: chunks of both sequences side by side, then chunks beside a
    decode step.
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


# Tokens [start, end) of each sequence
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
    # The model has to give the rows that it is asked for, in that order
    order = range(len(ids))[::-1]
    return Step(ids, parts, order), [rows[i] for i in order]


def _distance(found: torch.Tensor, wanted: torch.Tensor, rounding: torch.dtype) -> float:
    """The 2-norm of a row's difference, as a share of the row's own: the largest in float32, the
    median in 16 bits.
    """
    found, wanted = found.float(), wanted.float()
    rows = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(_NOTHING)
    return float(
        rows.max() if rounding == torch.float32 or not rows.isfinite().all() else rows.median()
    )
