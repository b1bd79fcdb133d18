"""The memory of the workers, known before they start, beside what the engine then takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiny_models import build

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.model.loader import load_model
from kvrelay.engine.runner import ModelRunner
from kvrelay.errors import ConfigError, ModelRefused
from kvrelay.launch.checks.memory_plan import PoolMemory, plan_memory
from kvrelay.models import resolve_model

USUAL = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
    "hidden_size": 128,
    "max_position_embeddings": 64,
}
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["rope_type", "type", "original_max_position_embeddings"]) | st.text(),
            inner | st.just("longrope"),
            max_size=3,
        )
    ),
)


def plan(folder: Path, **sections: dict[str, Any]) -> PoolMemory:
    """The memory of the decode pool."""
    config = {"model": {"path": str(folder)}, **sections}
    return plan_memory(ClusterConfig.model_validate(config))[1]


@pytest.mark.parametrize("architecture", ["demo", "llama", "qwen3", "mixtral", "phi3"])
@pytest.mark.parametrize("dtype", ["auto", "int8", "int4"])
def test_the_kv_of_one_sequence_is_what_the_engine_takes(
    architecture: str, dtype: str, tiny_model: Callable[..., Path]
) -> None:
    folder = Path(resolve_model("demo")) if architecture == "demo" else tiny_model(architecture)
    loaded = load_model(str(folder), identify=False)
    layout = loaded.layout(16, dtype)
    found = plan(folder, kv={"dtype": dtype, "block_size": 16})
    assert found.longest_sequence == loaded.max_model_len
    assert found.block_bytes == layout.block_bytes
    assert found.least_kv_bytes == layout.blocks_for(loaded.max_model_len) * layout.block_bytes
    assert found.sequences == found.kv_bytes // found.least_kv_bytes
    assert found.kv_tokens // 16 * layout.block_bytes <= found.kv_bytes


def test_heads_that_int4_cannot_hold_are_refused(tmp_path: Path) -> None:
    folder = build("llama", tmp_path, head_dim=10, hidden_size=40)
    assert plan(folder).block_bytes
    with pytest.raises(ConfigError, match=r"int4 holds heads .* multiples of 4.*int8 or auto"):
        plan(folder, kv={"dtype": "int4"})


@pytest.mark.parametrize("architecture", ["demo", "llama", "qwen3", "phi3"])
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_the_weights_are_what_the_engine_takes(
    architecture: str, weights: Literal["auto", "int8"], tiny_model: Callable[..., Path]
) -> None:
    folder = Path(resolve_model("demo")) if architecture == "demo" else tiny_model(architecture)
    runner = ModelRunner.load(str(folder), kv_bytes=2**24, weights=weights)
    # Packing adds to sizes that do not fill whole tiles, as those of tiny models.
    least = 0.95 if architecture == "demo" else 0.5
    found = plan(folder, decode={"weights": weights}).weight_bytes
    assert found is not None
    assert least <= found / runner.weight_bytes <= 1.02


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 64},
        {"max_position_embeddings": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        {**USUAL, "num_hidden_layers": "2"},
        {**USUAL, "v_head_dim": 16},
    ],
)
def test_the_kv_of_other_models_is_unknown(model: dict[str, Any], bare_model: Path) -> None:
    (bare_model / "config.json").write_text(json.dumps(model))
    found = plan(bare_model)
    assert (found.block_bytes, found.kv_tokens, found.sequences) == (0, 0, 0)
    assert found.least_kv_bytes == 0


@pytest.mark.parametrize("key", [*USUAL, "head_dim", "rope_scaling", "rope_parameters", "dtype"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=ODD)
def test_an_odd_value_is_for_the_worker_to_refuse(
    key: str, value: object, bare_model: Path
) -> None:
    (bare_model / "config.json").write_text(json.dumps({**USUAL, key: value}))
    try:
        found = plan(bare_model)
    except (ModelRefused, ConfigError):
        return
    assert found.least_kv_bytes >= 0
    assert 0 <= found.longest_sequence <= 2**70


@pytest.mark.parametrize(
    ("rope", "tokens"), [("yarn", 131072), ("llama3", 131072), ("longrope", 8192)]
)
def test_only_longrope_ends_at_the_length_of_its_training(
    rope: str, tokens: int, bare_model: Path
) -> None:
    scaling = {"rope_type": rope, "factor": 8.0, "original_max_position_embeddings": 8192}
    model = {**USUAL, "max_position_embeddings": 131072, "rope_scaling": scaling}
    (bare_model / "config.json").write_text(json.dumps(model))
    assert plan(bare_model).longest_sequence == tokens


@pytest.fixture
def bare_model(tmp_path: Path) -> Path:
    """A folder with weights of no tensor."""
    header = b"{}"
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return tmp_path
