"""The settings of an adapter: what is read, and what is refused with a reason."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import ModelRefused
from kvrelay.models.adapters.peft_config import PeftConfig

PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj"],
}
Q, V = "model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.v_proj"


def parsed(**settings: Any) -> PeftConfig:
    return PeftConfig.parse({**PLAIN, **settings}, "adapter_config.json")


def test_the_scale_is_alpha_over_rank_or_over_its_root() -> None:
    assert parsed().scale_of(Q) == 2.0
    assert parsed(use_rslora=True).scale_of(Q) == 16 / 8**0.5


def test_patterns_set_rank_and_alpha_of_modules_by_the_end_of_their_names() -> None:
    config = parsed(
        rank_pattern={"q_proj": 4, r"layers\.[12]\..*": 2}, alpha_pattern={r".*\.v_proj": 1}
    )
    assert (config.rank_of(Q), config.rank_of(V)) == (4, 8)
    assert config.rank_of("model.layers.1.self_attn.v_proj") == 2
    assert (config.scale_of(Q), config.scale_of(V)) == (4.0, 1 / 8)
    assert config.largest_rank == 8
    assert parsed(rank_pattern={"q_proj": 99}).largest_rank == 99
    # A name that only ends alike is another module.
    assert config.rank_of("model.layers.3.self_attn.xq_proj") == 8


def test_targets_are_names_and_ends_of_names() -> None:
    config = parsed(target_modules=["q_proj", "lm.up"])
    assert config.targets_module(Q)
    assert config.targets_module("lm.up")
    assert not config.targets_module("model.xq_proj")
    assert not config.targets_module(V)


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|v)_proj"])
def test_where_an_expression_chose_the_modules_the_tensors_tell(targets: str) -> None:
    config = parsed(target_modules=targets)
    assert config.targets is None
    assert config.targets_module("anything")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"peft_type": "IA3"}, "only LORA is supported"),
        ({"task_type": "SEQ_CLS"}, "only CAUSAL_LM is supported"),
        ({"bias": "all"}, "changes biases"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "replaces whole layers"),
        ({"lora_bias": True}, "adds biases"),
        ({"trainable_token_indices": [1]}, "embeddings"),
        ({"target_parameters": ["experts.w"]}, "not those of a linear layer"),
        ({"layer_replication": [[0, 1]]}, "number of layers"),
        ({"use_something_new": 3}, "does not know the setting"),
        ({"init_lora_weights": "pissa"}, "changes the weights of the base model"),
        ({"init_lora_weights": 1}, "changes the weights of the base model"),
        ({"r": 0}, "a whole number above 0"),
        ({"r": True}, "a whole number above 0"),
        ({"r": 2**40}, "a whole number above 0"),
        ({"lora_alpha": float("nan")}, "a number up to"),
        ({"lora_alpha": "8"}, "a number up to"),
        ({"use_rslora": "yes"}, "true and false"),
        ({"target_modules": []}, "allowed are a list"),
        ({"target_modules": [1]}, "no list of at most"),
        ({"target_modules": None}, "allowed are a list"),
        ({"rank_pattern": {"(": 2}}, "missing ), unterminated subpattern"),
        ({"rank_pattern": {"(a+)+b": 2}}, "after a bracket"),
        ({"alpha_pattern": {"a*a*a*a*b": 2}}, "two of"),
        ({"rank_pattern": {"a?b?c?": 2}}, "two of ?"),
        ({"alpha_pattern": {"q_proj": None}}, "a number up to"),
        ({"rank_pattern": []}, None),
        ({"rank_pattern": [1]}, "no mapping"),
    ],
)
def test_what_would_change_the_result_is_refused(
    settings: dict[str, Any], reason: str | None
) -> None:
    if reason is None:
        parsed(**settings)
        return
    with pytest.raises(ModelRefused, match=re.escape(reason)) as refused:
        parsed(**settings)
    assert str(refused.value).startswith("adapter_config.json: ")
    assert "\n" not in refused.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*PLAIN, "rank_pattern", "alpha_pattern", "bias"]), JSON))
def test_any_json_is_read_or_refused(settings: dict[str, Any]) -> None:
    try:
        config = parsed(**settings)
    except ModelRefused:
        return
    assert config.scale_of(Q) != 0
    assert 0 < config.rank_of(Q) < 2**31


NAME = st.lists(st.sampled_from(["a", "b", "ab", ""]), min_size=1, max_size=5).map(".".join)


@given(st.lists(NAME.filter(bool), min_size=1), NAME)
def test_targets_match_as_in_peft(targets: list[str], module: str) -> None:
    expected = any(module == one or module.endswith(f".{one}") for one in targets)
    assert parsed(target_modules=targets).targets_module(module) is expected


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("quantifier", ["a*", "a+", "a{2}", "a?"])
def test_patterns_that_cost_time_are_few(name: str, quantifier: str) -> None:
    plain: dict[str, int] = {f"layers.{number}.q_proj": 2 for number in range(200)}
    costly = {f"{number}{quantifier}": 2 for number in range(17)}
    with pytest.raises(ModelRefused, match=r"17 patterns with .* allowed are 16"):
        parsed(**{name: plain | costly})
    del costly[f"0{quantifier}"]
    assert len(getattr(parsed(**{name: plain | costly}), name)) == 216
