"""Loads a transformers causal LM, or raises ModelRefused with the reason."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from kvrelay.engine.attention import paged_attention
from kvrelay.engine.attention.latent_attention import absorb, forget_expansion, undo
from kvrelay.engine.model import attention_probe
from kvrelay.engine.model.attention_probe import Probed, probe
from kvrelay.engine.model.checkpoint import Checkpoint, find_checkpoint
from kvrelay.engine.model.facts import max_model_len
from kvrelay.engine.model.self_check import check_against_own_attention
from kvrelay.engine.model.weight_size_check import check_sizes
from kvrelay.errors import ModelRefused
from kvrelay.models.model_identity import tokenizer_id
from kvrelay.types.kv_layout import KvLayout, LayerKv

# Attention functions that take latent vectors.
_OURS = frozenset({paged_attention.NAME, attention_probe.NAME})


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checked model in memory, with the facts from its configuration that the engine needs."""

    model: PreTrainedModel
    # Configuration of the text model, if the model has several.
    config: PretrainedConfig
    model_id: str
    # Dtype of the weights.
    dtype: str
    eos_token_ids: frozenset[int]
    max_model_len: int  # tokens
    vocab_size: int
    # Sizes with the KV heads of all ranks.
    kv_layers: tuple[LayerKv, ...]
    kv_dtype: str
    # Number of ranks that share weights and KV heads. Each rank loads its own share.
    ranks: int = 1
    # The id that workers of protocol 0 give the model.
    sampled_model_id: str = ""
    # Hash of the files that define the vocabulary.
    tokenizer_id: str = ""
    # The folder of these files. Empty for a model without files.
    folder: str = ""
    # The tokens that each layer attends to; 0 for all of the longest sequence.
    windows: tuple[int, ...] = ()

    @property
    def windowed(self) -> bool:
        """True if a layer attends to fewer tokens than the longest sequence has."""
        return any(self.windows)

    def layout(
        self, block_size: int, kv_dtype: str, *, longest: int = 0, windows: bool = False
    ) -> KvLayout:
        """The KV layout. kv_dtype auto is the dtype that the model attends in. windows: blocks of
        sequences of up to `longest` tokens may lack the KV of windowed layers, if that saves
        memory.
        """
        dtype = self.kv_dtype if kv_dtype == "auto" else kv_dtype
        layout = KvLayout(self.kv_layers, block_size, dtype, ranks=self.ranks)
        kept = tuple(window if window < longest else 0 for window in self.windows)
        return layout.with_windows(kept) if windows else layout


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    ranks: int = 1,
    identify: bool = True,
    latents: bool = True,
) -> LoadedModel:
    """Loads a model from a folder or a hub id, in evaluation mode with paged attention.

    With `ranks` > 1 this process loads its share, together with the other ranks. Without `identify`
    the model id is empty. latents: keeps the latent vectors of latent attention instead of K and V;
    ranks never do. Raises ModelRefused.
    """
    checkpoint = find_checkpoint(path)
    # The weights are hashed while they are loaded: both read the same pages of the same files.
    hashing = ThreadPoolExecutor(1, "model-id")
    try:
        model_id = hashing.submit(lambda: checkpoint.model_id if identify else "")
        model = _load(path, checkpoint, dtype, device, ranks)
        loaded = loaded_model(model, path, model_id.result(), ranks=ranks, latents=latents)
    finally:
        hashing.shutdown(wait=False, cancel_futures=True)
    return replace(
        loaded,
        sampled_model_id=checkpoint.sampled_model_id,
        tokenizer_id=tokenizer_id(checkpoint.folder),
        folder=str(checkpoint.folder),
    )


def check_model(path: str, checkpoint: Checkpoint) -> None:
    """Raises ModelRefused for what the configuration and the headers of the weights tell. Allocates
    no memory for weights.
    """
    try:
        config = AutoConfig.from_pretrained(str(checkpoint.folder), local_files_only=True)
        _check_kind(check_sizes(config, checkpoint), path)
    except ModelRefused:
        raise
    # A configuration can make transformers raise any exception.
    except Exception as error:
        raise _not_loaded(path, error) from error


def _not_loaded(path: str, error: Exception) -> ModelRefused:
    return ModelRefused(f"{path}: transformers cannot load it: {first_line(error)}")


def _load(
    path: str, checkpoint: Checkpoint, dtype: str, device: str, ranks: int
) -> PreTrainedModel:
    check_model(path, checkpoint)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(checkpoint.folder),
            dtype=dtype,
            attn_implementation=paged_attention.NAME,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            # Mismatches are refused below, with the names of the weights.
            ignore_mismatched_sizes=True,
            distributed_config=DistributedConfig(tp_size=ranks) if ranks > 1 else None,
        )
    # A model's own code can raise any exception.
    except Exception as error:
        raise _not_loaded(path, error) from error
    wrong = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    wrong += [
        f"{name} is {found}, not {wanted}"
        for name, found, wanted in sorted(report["mismatched_keys"])
    ]
    if wrong:
        raise ModelRefused(
            f"{path}: {len(wrong)} weights are missing or have the wrong shape; the first: "
            f"{wrong[0]}"
        )
    try:
        # A share is already on its rank's device.
        return model.to(device) if ranks == 1 else model
    except torch.OutOfMemoryError as error:
        raise ModelRefused(
            f"{path}: {weight_bytes(model)} bytes of weights do not fit on {device}: {error}"
        ) from error


def loaded_model(
    model: PreTrainedModel, name: str, model_id: str, *, ranks: int = 1, latents: bool = True
) -> LoadedModel:
    """Checks a model in memory that attends by `paged_attention.NAME`. Raises ModelRefused, whose
    message starts with `name`.
    """
    _check_kind(model, name)
    kind = type(model).__name__
    model = model.eval().requires_grad_(False)
    config = model.config.get_text_config()
    try:
        longest = max_model_len(config)
        probed = None
        if latents and ranks == 1 and absorb(model, _OURS):
            probed = _probed_with_latents(model, longest)
        if probed is None:
            probed = _probed(model, longest)
    except ModelRefused as error:
        raise ModelRefused(f"{name}: {error.message}") from error
    # A model's own code can raise any exception.
    except Exception as error:
        raise ModelRefused(
            f"{name}: {kind} fails with paged attention: {first_line(error)}"
        ) from error
    return LoadedModel(
        model=model,
        config=config,
        model_id=model_id,
        dtype=str(model.dtype).removeprefix("torch."),
        eos_token_ids=_eos_token_ids(model),
        max_model_len=longest,
        vocab_size=config.vocab_size,
        kv_layers=tuple(replace(layer, kv_heads=layer.kv_heads * ranks) for layer in probed.layers),
        kv_dtype=probed.dtype,
        ranks=ranks,
        windows=probed.windows,
    )


def _probed(model: PreTrainedModel, longest: int) -> Probed:
    """Determines and checks what the model's attention needs. Raises ModelRefused."""
    probed = probe(model, model.config.get_text_config().num_hidden_layers, longest)
    if probed.drops_keywords:
        paged_attention.carry_batch(model)
    check_against_own_attention(model, probed.layers, probed.dtype)
    return probed


def _probed_with_latents(model: PreTrainedModel, longest: int) -> Probed | None:
    """`_probed` for a model with absorbed matrices. Returns None if its own attention shows that
    they do not fit this model, which then keeps K and V.
    """
    try:
        probed = _probed(model, longest)
    except ModelRefused:
        undo(model)
        return None
    forget_expansion(model)
    return probed


def _check_kind(model: PreTrainedModel, name: str) -> None:
    """Raises ModelRefused if the attributes of the model's class rule it out."""
    kind = type(model).__name__
    if model._is_stateful:
        raise ModelRefused(
            f"{name}: {kind} keeps a state that is not a KV cache, which is not supported"
        )
    if not model._supports_attention_backend:
        raise ModelRefused(
            f"{name}: {kind} does not support attention backends of transformers, so its "
            "results would be wrong"
        )


def first_line(error: Exception) -> str:
    """The exception's type and the first line of its message, for use in an error message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]:.300}".removesuffix(": ")


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Ids that end an answer, from the generation config if it has them, else from the config.
    Raises ModelRefused.
    """
    generation: Any = model.generation_config
    for source in (generation, model.config.get_text_config()):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found = ids if isinstance(ids, list) else [ids]
            if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in found):
                raise ModelRefused(
                    f"eos_token_id {ids!r:.100} is neither a token id nor a list of token ids"
                )
            return frozenset(found)
    return frozenset()


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers. Tied tensors count once; tensors that ranks share count
    in full.
    """
    tensors = (*model.parameters(), *model.buffers())
    places = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(
        {
            place.data_ptr(): tensor.nbytes for place, tensor in zip(places, tensors, strict=True)
        }.values()
    )
