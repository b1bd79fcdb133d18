"""Reads sizes from config.json, whose keys have other names in some families of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.errors import ModelRefused
from kvrelay.models.model_json import text_config

# Larger sizes are mistakes.
_LARGEST = 2**31
# A model with more would not load; the bound keeps an odd configuration from taking memory.
MAX_LAYERS = 4096
_MAX_HEADS = 2**16
# Families that have no grouped heads, whatever the file says.
_NO_GROUPS = {"gpt2", "gpt_neox", "gpt_neo", "gptj", "opt", "bloom", "codegen", "xglm", "biogpt"}
# Families whose missing key means as many KV heads as query heads.
_AS_MANY_KV_HEADS = {
    *("llama", "phi", "olmo", "olmo2", "mpt", "stablelm", "persimmon", "cohere", "granite"),
    "phi3",
}
# Keys of models that run the same layers several times, and keep KV of each time or of the last.
_LOOPS = ("n_recurrent_loops", "total_ut_steps", "num_loops", "mean_recurrence")
# Sizes that config.json of a family may leave out. Source: the configuration classes of
# transformers, where the published files rely on them.
_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma": {"head_dim": 256},
    "qwen3": {"head_dim": 128},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
}


@dataclass(frozen=True, slots=True)
class ShapeKeys:
    """The keys of one config.json; those of the text model if the model has several."""

    values: Mapping[str, Any]
    model_type: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ShapeKeys:
        """Selects the keys of the text model. Raises ModelRefused if the model is none."""
        values = text_config(config)
        model_type = values.get("model_type", "")
        if not isinstance(model_type, str):
            raise ModelRefused(f"config.json: model_type is {model_type!r:.60}, not a name")
        if values.get("is_encoder_decoder") is True:
            raise ModelRefused(
                f"config.json: {model_type!r:.60} is an encoder with a decoder; give a model that "
                "only decodes"
            )
        keys = cls(values, model_type)
        for name in _LOOPS:
            if keys.optional(name) > 1:
                raise ModelRefused(
                    f"config.json: {name} is {keys.optional(name)}: the model runs its layers "
                    "several times, so its KV does not follow from its layers; it must be 1"
                )
        return keys

    def of_layer(self, index: int) -> ShapeKeys:
        """Returns the keys of one layer: those of the model, with the values that
        `per_layer_config` overrides for the layer. Raises ModelRefused if it is no mapping.

        Source: `per_layer_config` of transformers' PreTrainedConfig; indices may be padded ("05").
        """
        given = self.values.get("per_layer_config")
        if given is None:
            return self
        if not isinstance(given, dict) or len(given) > MAX_LAYERS:
            raise ModelRefused(
                f"config.json: per_layer_config is {str(given)[:60]!r}; it must map at most "
                f"{MAX_LAYERS} layers to keys"
            )
        own = given.get(str(index), given.get(f"{index:02}", given.get(f"{index:03}", {})))
        if not isinstance(own, dict):
            raise ModelRefused(
                f"config.json: per_layer_config of layer {index} is {str(own)[:60]!r}; it must map "
                "keys to values"
            )
        return ShapeKeys({**self.values, **own}, self.model_type) if own else self

    def optional(self, *names: str) -> int:
        """Returns the first of the sizes that is given; 0 if none is, or if it is null. Raises
        ModelRefused for a value that is not a size.
        """
        for name in names:
            value = self.values.get(name)
            if value is None:
                value = _DEFAULTS.get(self.model_type, {}).get(name)
            if value is None:
                continue
            if type(value) is not int or not 0 <= value <= _LARGEST:
                raise ModelRefused(
                    f"config.json: {name} is {value!r:.60}; it must be a whole number from 0 to "
                    f"{_LARGEST}"
                )
            return value
        return 0

    def size(self, *names: str) -> int:
        """Returns the first of the sizes that is given. Raises ModelRefused if none is above 0."""
        if found := self.optional(*names):
            return found
        given = next((name for name in names if self.values.get(name) is not None), None)
        wrong = f"{given} is 0" if given else f"{names[0]} is missing"
        raise ModelRefused(f"config.json: {wrong}; it must be a whole number above 0")

    def flag(self, name: str) -> bool | None:
        """Returns a truth value, or None if it is not given. Raises ModelRefused."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise ModelRefused(f"config.json: {name} is {value!r:.60}; it must be true or false")
        return value

    def names(self, name: str) -> list[str] | None:
        """Returns a list of names, or None if it is not given. Raises ModelRefused."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ModelRefused(f"config.json: {name} is {value!r:.60}; it must be a list of names")
        return value

    def indices(self, name: str) -> list[int]:
        """Returns a list of layers; empty if it is not given. Raises ModelRefused."""
        value = self.values.get(name)
        if value is None:
            return []
        if (
            not isinstance(value, list)
            or not all(type(one) is int for one in value)
            or len(value) > MAX_LAYERS
        ):
            raise ModelRefused(
                f"config.json: {name} is {str(value)[:60]!r}; it must be a list of at most "
                f"{MAX_LAYERS} whole numbers"
            )
        return value

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        found = self.size("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        if found > MAX_LAYERS:
            raise ModelRefused(f"config.json: {found} layers are more than {MAX_LAYERS}")
        return found

    @property
    def hidden(self) -> int:
        """Width of the hidden state, in values."""
        return self.size("hidden_size", "n_embd", "d_model")

    @property
    def heads(self) -> int:
        """Number of query heads."""
        found = self.size("num_attention_heads", "n_head", "n_heads", "num_heads")
        if found > _MAX_HEADS:
            raise ModelRefused(f"config.json: {found} attention heads are more than {_MAX_HEADS}")
        return found

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        found = self._kv_heads()
        if found > self.heads or self.heads % found:
            raise ModelRefused(
                f"config.json: {self.heads} attention heads cannot share {found} KV heads; the "
                "number of attention heads must be a multiple of num_key_value_heads"
            )
        return found

    def _kv_heads(self) -> int:
        if self.model_type == "falcon" and not self.flag("new_decoder_architecture"):
            return 1 if self.flag("multi_query") is not False else self.heads
        if self.model_type == "gpt_bigcode":
            return 1 if self.flag("multi_query") is not False else self.heads
        if self.model_type in _NO_GROUPS:
            return self.heads
        found = self.optional("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
        if found:
            return found
        if self.model_type in _AS_MANY_KV_HEADS:
            return self.heads
        return self.size("num_key_value_heads")

    @property
    def head_dim(self) -> int:
        """Values of one head."""
        if self.model_type == "zamba2":
            # Its attention reads the hidden state beside the embeddings.
            return 2 * self.hidden // self.heads
        found = self.optional("head_dim", "kv_channels", "attention_head_dim")
        if found:
            return found
        if self.hidden < self.heads:
            raise ModelRefused(
                f"config.json: {self.heads} heads do not fit into a hidden_size of {self.hidden}"
            )
        return self.hidden // self.heads

    @property
    def intermediate(self) -> int:
        """Width of a dense feed-forward layer, in values. Some models have sparse layers only."""
        found = self.optional("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
        if self.model_type == "lfm2" and self.flag("block_auto_adjust_ff_dim") is not False:
            # Source: Lfm2MLP of transformers.
            unit = self.optional("block_multiple_of") or 256
            return -(-(2 * (found or 12_288) // 3) // unit) * unit
        return found or self.optional("moe_intermediate_size") or 4 * self.hidden

    @property
    def experts(self) -> int:
        """Number of experts that a router chooses from; 0 for a dense model."""
        if self.flag("is_moe") is False:
            return 0
        return self.optional(
            "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"
        )

    @property
    def chosen(self) -> int:
        """Number of experts that a token visits."""
        found = self.size(
            "num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_k", "moe_topk"
        )
        if found > self.experts:
            raise ModelRefused(
                f"config.json: a token visits {found} experts, and the model has {self.experts}"
            )
        return found

    def is_sparse(self, index: int) -> bool:
        """Whether a layer has experts."""
        first = self.optional("first_k_dense_replace", "moe_layer_start_index")
        last = self.optional("moe_layer_end_index") or MAX_LAYERS
        if not self.experts or not first <= index <= last:
            return False
        if period := self.optional("expert_layer_period"):
            return index % period == self.optional("expert_layer_offset")
        step = self.optional(
            "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"
        )
        return (index + 1) % (step or 1) == 0 and index not in self.indices("mlp_only_layers")
