"""The sizes of a model, read from its config.json without a model library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.models.layer_kinds import LayerKind, layer_kinds
from kvrelay.models.shape_keys import ShapeKeys
from kvrelay.types.kv_layout import LayerKv

# Models whose feed-forward layers have two matrices, not three.
_PLAIN_FEED_FORWARD = {
    *("gpt2", "gpt_neox", "gpt_neo", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2"),
    *("gpt_bigcode", "mpt", "nemotron", "nemotron_h", "codegen", "stablelm_epoch", "xglm"),
    *(
        "apertus",
        "apertus1p5",
        "apertus1p5_text",
        "arcee",
        "biogpt",
        "persimmon",
        "jais2",
        "nanochat",
    ),
}
# Models with a shared expert that config.json does not mention.
_ONE_SHARED_EXPERT = {"llama4", "llama4_text"}
# Models whose missing key means that the head shares the matrix of the embeddings.
_TIED_BY_DEFAULT = {
    *("gpt2", "opt", "bloom", "gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2"),
    *("falcon", "gpt_bigcode", "starcoder2"),
}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of each token, or of each sequence."""

    kind: LayerKind
    # K and V of all heads; None for a layer without KV of its own.
    kv: LayerKv | None = None
    # Tokens that the layer attends to; 0 for all.
    window: int = 0
    # Values per token of the compressed form of multi-head latent attention, and those of them that
    # K and V are computed from; 0 for other layers.
    latent: int = 0
    latent_rank: int = 0


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Feed-forward matrices of one layer, in parameters."""

    # Of all experts, and of those that a token visits.
    total: int
    active: int
    # Experts that the router chooses from, and those that it chooses; 0 for a dense layer.
    experts: int = 0
    chosen: int = 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of the experts that the router chooses from."""
        if self.experts <= self.chosen:
            return 0
        return (self.total - self.active) * self.experts // (self.experts - self.chosen)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model."""

    model_type: str
    hidden: int
    heads: int
    vocab: int
    layers: tuple[LayerShape, ...]
    feed_forward: tuple[FeedForward, ...]
    # Parameters of the attention matrices of each layer.
    attention: tuple[int, ...]
    # The head shares the matrix of the embeddings.
    tied: bool
    # Longest sequence in tokens; 0 if config.json does not say.
    max_position: int
    # Widest row of a feed-forward layer, in values.
    intermediate: int
    # Parameters of embeddings that each layer looks up for itself.
    layer_embeddings: int = 0

    @property
    def parameters(self) -> int:
        """Parameters of all matrices: embeddings, attention, feed-forward, head. Biases and norms,
        below 0.1 % of a model, are left out.
        """
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2) + self.layer_embeddings
        return embeddings + sum(self.attention) + sum(one.total for one in self.feed_forward)

    @property
    def lookup_parameters(self) -> int:
        """Parameters of which a token reads one row: the embeddings, unless the head shares them,
        and those of the layers.
        """
        return self.layer_embeddings + (0 if self.tied else self.vocab * self.hidden)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token visits: of the experts only the chosen ones."""
        return self.parameters - sum(one.total - one.active for one in self.feed_forward)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts that routers choose from."""
        return sum(one.expert_parameters for one in self.feed_forward)

    @property
    def dense_parameters(self) -> int:
        """Parameters that every token visits."""
        return self.parameters - self.expert_parameters


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Returns the sizes of a model. config: the content of config.json.

    Raises ModelRefused, which names the key, for sizes that are missing or impossible.
    """
    keys = ShapeKeys.of(config)
    kinds = layer_kinds(keys)
    own = [keys.of_layer(index) for index in range(len(kinds))]
    layers = tuple(
        _layer(each, kind, window) for each, (kind, window) in zip(own, kinds, strict=True)
    )
    feed_forward = tuple(_feed_forward(each, index) for index, each in enumerate(own))
    embedded = keys.optional("vocab_size_per_layer_input") * len(layers)
    tied = keys.flag("tie_word_embeddings")
    return ModelShape(
        model_type=keys.model_type,
        hidden=keys.hidden,
        heads=keys.heads,
        vocab=keys.size("vocab_size"),
        layers=layers,
        feed_forward=feed_forward,
        attention=tuple(_attention(each, one) for each, one in zip(own, layers, strict=True)),
        tied=keys.model_type in _TIED_BY_DEFAULT if tied is None else tied,
        max_position=keys.optional(
            "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"
        ),
        intermediate=max(keys.intermediate, keys.optional("moe_intermediate_size")),
        layer_embeddings=embedded * keys.optional("hidden_size_per_layer_input"),
    )


def _layer(keys: ShapeKeys, kind: LayerKind, window: int) -> LayerShape:
    if kind in ("state", "shared", "none"):
        return LayerShape(kind)
    if kind == "latent":
        rope, nope = keys.size("qk_rope_head_dim"), keys.size("qk_nope_head_dim")
        expanded = LayerKv(keys.heads, nope + rope, keys.size("v_head_dim"))
        rank = keys.size("kv_lora_rank")
        return LayerShape(kind, expanded, window, rank + rope, rank)
    heads, dim = keys.kv_heads, keys.head_dim
    if kind == "full" and (wide := keys.optional("global_head_dim")):
        heads, dim = keys.optional("num_global_key_value_heads") or heads, wide
    v_dim = keys.optional("v_head_dim") or dim
    if kind == "sliding":
        # Source: MiMoV2FlashAttention of transformers, which doubles the heads of windows.
        doubled = 2 * heads if keys.model_type == "mimo_v2_flash" else heads
        heads = keys.optional("swa_num_key_value_heads") or doubled
        dim = keys.optional("swa_head_dim") or dim
        v_dim = keys.optional("swa_v_head_dim") or v_dim
    return LayerShape(kind, LayerKv(heads, dim, v_dim), window)


def _attention(keys: ShapeKeys, layer: LayerShape) -> int:
    """Returns the parameters of the attention matrices. A layer with a state counts as attention
    with as many heads.
    """
    hidden, heads = keys.hidden, keys.heads
    if layer.kind == "none":
        return 0
    if layer.kind == "latent" and layer.kv is not None:
        rank, rope = keys.size("kv_lora_rank"), keys.size("qk_rope_head_dim")
        wide, nope = heads * layer.kv.k_dim, layer.kv.k_dim - rope
        q_rank = keys.optional("q_lora_rank")
        query = q_rank * (hidden + wide) if q_rank else hidden * wide
        up = rank * heads * (nope + layer.kv.v_dim)
        return query + hidden * (rank + rope) + up + heads * layer.kv.v_dim * hidden
    kv = layer.kv or LayerKv(keys.kv_heads, keys.head_dim, keys.head_dim)
    own = 0 if layer.kind == "shared" else hidden * kv.kv_heads * (kv.k_dim + kv.v_dim)
    return own + hidden * heads * (kv.k_dim + kv.v_dim)


def _feed_forward(keys: ShapeKeys, index: int) -> FeedForward:
    matrices = keys.hidden * (2 if keys.model_type in _PLAIN_FEED_FORWARD else 3)
    if not keys.is_sparse(index):
        dense = matrices * keys.intermediate
        # Projections of the embeddings that each layer looks up for itself.
        dense += 3 * keys.hidden * keys.optional("hidden_size_per_layer_input")
        return FeedForward(dense, dense)
    each = matrices * (keys.optional("moe_intermediate_size") or keys.intermediate)
    shared = matrices * keys.optional("shared_expert_intermediate_size", "shared_intermediate_size")
    if keys.model_type in _ONE_SHARED_EXPERT:
        shared = each
    common = shared or each * keys.optional("n_shared_experts", "moe_num_shared_experts")
    common += keys.hidden * keys.experts
    return FeedForward(
        common + each * keys.experts, common + each * keys.chosen, keys.experts, keys.chosen
    )
