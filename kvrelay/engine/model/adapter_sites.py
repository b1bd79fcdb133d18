"""Finds the linear layers of a model that adapters may change, and adds the updates to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvrelay.engine.adapters.low_rank import NativeUpdate, Site, TorchUpdate, Update
from kvrelay.engine.adapters.step_adapters import StepAdapters
from kvrelay.engine.base.kv_memory import KvPool
from kvrelay.engine.base.step_input import Part, Step
from kvrelay.engine.forward.torch_forward import TorchForward
from kvrelay.engine.model.kernel_modules import GatedUpdates, NativeGatedLayer, NativeLinear
from kvrelay.engine.model.loader import LoadedModel
from kvrelay.types.kv_layout import KvLayout

# Tokens of a trial step, from all over the vocabulary, and those of a block.
_TRIAL_TOKENS, _BLOCK_SIZE = 16, 4
# Norms square what layers compute, and scores of attention are products of it. Squares of larger
# values overflow in float32, if not in the trial step then in another one.
_LARGEST = 1e18
_GATED = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer, and the module that computes it: a gated layer computes two."""

    site: Site
    module: nn.Module


def find_layers(loaded: LoadedModel) -> list[Layer]:
    """The linear layers that see each row of a step exactly once, without the output head.

    Layers of experts see only some of the rows, so an update could not tell whose they are. Runs
    one step of a few tokens, so that the model itself tells.
    """
    layers = list(_linear_layers(loaded.model))
    seen = _rows_seen(loaded, layers)
    return [layer for layer in layers if seen[layer.module] == [_TRIAL_TOKENS]]


def _linear_layers(model: PreTrainedModel) -> Iterator[Layer]:
    head = model.get_output_embeddings()
    renamed: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if module is head:
            continue
        if isinstance(module, NativeGatedLayer):
            renamed[module.down] = f"{name}.down_proj"
            for part in _GATED:
                yield Layer(Site(f"{name}.{part}", module.in_features, module.out_features), module)
        elif type(module) is nn.Linear or isinstance(module, NativeLinear):
            site = Site(renamed.get(module, name), module.in_features, module.out_features)
            yield Layer(site, module)
        elif type(module) is Conv1D:
            inputs, outputs = module.weight.shape
            yield Layer(Site(name, inputs, outputs), module)


def _rows_seen(loaded: LoadedModel, layers: list[Layer]) -> dict[nn.Module, list[int]]:
    """Numbers of rows in each call of a layer, in a step of _TRIAL_TOKENS tokens."""
    seen: dict[nn.Module, list[int]] = {layer.module: [] for layer in layers}

    def note(module: nn.Module, args: Any) -> None:
        seen[module].append(args[0].shape[:-1].numel())

    with _hooks(module.register_forward_pre_hook(note) for module in seen):
        _trial_logits(loaded)
    return seen


def overflows(loaded: LoadedModel, layers: list[Layer], step: StepAdapters, slot: int) -> bool:
    """Whether the model with the adapter in `slot` computes values that are not finite, or so large
    that a sum of their squares is not. Runs one step of a few tokens.
    """
    found: list[bool] = []

    def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        # False for NaN, too.
        found.append(bool((output.abs() < _LARGEST).all()))

    modules = {layer.module for layer in layers}
    with _hooks(module.register_forward_hook(note) for module in modules):
        logits = _trial_logits(loaded, step, slot)
    return not (all(found) and logits.isfinite().all())


@contextmanager
def _hooks(added: Iterable[RemovableHandle]) -> Iterator[None]:
    handles = list(added)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def _trial_logits(
    loaded: LoadedModel, step: StepAdapters | None = None, slot: int | None = None
) -> torch.Tensor:
    """The logits [_TRIAL_TOKENS, vocab_size] of a step on KV of its own."""
    blocks = list(range(_TRIAL_TOKENS // _BLOCK_SIZE))
    layout = KvLayout(loaded.kv_layers, _BLOCK_SIZE, loaded.kv_dtype)
    pool = KvPool(layout, len(blocks), str(loaded.model.device))
    rows = list(range(_TRIAL_TOKENS))
    ids = [loaded.vocab_size * row // _TRIAL_TOKENS for row in rows]
    part = Part(0, len(ids), 0, blocks, adapter=slot)
    try:
        return TorchForward(loaded.model, pool, step)(Step(ids, [part], rows))
    finally:
        pool.close()


def attach(
    layers: list[Layer], step: StepAdapters, slots: int, *, native: bool
) -> tuple[dict[str, Update], list[Callable[[], None]]]:
    """Adds updates for `slots` adapters to the layers. Returns them by the layers' names, and the
    functions that take them off.

    A step without adapters computes what it computed before.
    """
    kind = NativeUpdate if native else TorchUpdate
    updates: dict[str, Update] = {}
    undo: list[Callable[[], None]] = []
    gated: dict[NativeGatedLayer, list[NativeUpdate]] = {}
    for layer in layers:
        update = kind(layer.site, step, slots)
        updates[layer.site.name] = update
        if isinstance(layer.module, NativeGatedLayer):
            assert isinstance(update, NativeUpdate), "only the native kernels fuse layers"
            gated.setdefault(layer.module, []).append(update)
        else:
            undo.append(layer.module.register_forward_hook(_hook(update, step)).remove)
    for module, (gate, up) in gated.items():
        module.updates = GatedUpdates(step, gate, up)
        undo.append(partial(setattr, module, "updates", None))
    return updates, undo


def _hook(update: Update, step: StepAdapters) -> Any:
    def add(_module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if step.active:
            update.add(args[0], output)

    return add
