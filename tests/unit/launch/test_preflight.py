"""Checks of a machine before a cluster starts on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.model.loader import load_model
from kvrelay.errors import ConfigError, Unavailable
from kvrelay.launch import preflight
from kvrelay.models import resolve_model
from kvrelay.models.model_json import read_model_json

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
FREE_PORTS = dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0")


@pytest.mark.parametrize("architecture", ["demo", "llama", "qwen3", "mixtral", "phi3"])
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_the_least_kv_memory_is_what_one_sequence_takes(
    architecture: str, dtype: str, tiny_model: Callable[..., Path]
) -> None:
    folder = Path(resolve_model("demo")) if architecture == "demo" else tiny_model(architecture)
    loaded = load_model(str(folder), identify=False)
    layout = loaded.layout(16, dtype)
    found, tokens = preflight.least_kv_bytes(
        read_model_json(folder / "config.json"), None, 16, dtype
    )
    exact = layout.blocks_for(loaded.max_model_len) * layout.block_bytes
    assert tokens == loaded.max_model_len
    if dtype == "auto":
        assert found == exact
    else:
        # The check leaves out the scales.
        assert exact // 2 <= found < exact


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 64},
        {"max_position_embeddings": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        {"num_hidden_layers": "2", "num_key_value_heads": 2, "hidden_size": 64},
        {**USUAL, "v_head_dim": 16},
    ],
)
def test_other_models_are_for_the_worker_to_check(model: dict[str, Any]) -> None:
    assert preflight.least_kv_bytes(model, None, 16, "auto") == (0, 0)


@pytest.mark.parametrize("key", [*USUAL, "head_dim", "rope_scaling", "rope_parameters"])
@given(value=ODD)
def test_an_odd_value_is_for_the_worker_to_refuse(key: str, value: object) -> None:
    needed, tokens = preflight.least_kv_bytes({**USUAL, key: value}, None, 16, "auto")
    assert needed >= 0
    assert 0 <= tokens <= 2**70


@pytest.mark.parametrize(
    ("rope", "tokens"), [("yarn", 131072), ("llama3", 131072), ("longrope", 8192)]
)
def test_only_longrope_ends_at_the_length_of_its_training(rope: str, tokens: int) -> None:
    scaling = {"rope_type": rope, "factor": 8.0, "original_max_position_embeddings": 8192}
    model = {**USUAL, "max_position_embeddings": 131072, "rope_scaling": scaling}
    assert preflight.least_kv_bytes(model, None, 16, "auto")[1] == tokens


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"kv": {"memory": 1}},
            "1 bytes of a prefill worker do not hold one sequence .* which takes 10485760 bytes",
        ),
        (
            {"decode": {"kv": {"memory": 1}}, "model": {"max_model_len": 32}},
            "1 bytes of a decode worker do not hold one sequence .* which takes 81920 bytes",
        ),
        (
            {"prefill": {"replicas": 1024}, "decode": {"replicas": 1024}},
            "2048 workers are more than this machine can run; .* allow at most 8, .*; lower "
            "--prefill and --decode",
        ),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_starts(
    config: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "memory_bytes", lambda: 2**30)
    loaded = ClusterConfig.model_validate({"listen": FREE_PORTS, **config})
    with pytest.raises(ConfigError, match=words):
        preflight.check_machine(loaded, is_local=True)


# No user can write to /proc, not even root.
@pytest.mark.parametrize("folder", ["/proc", "/nowhere"])
def test_shared_memory_that_cannot_be_written_to_is_named(folder: str) -> None:
    with pytest.raises(Unavailable, match=f"{folder} cannot be written to: .*--shm-size"):
        preflight.check_shared_memory(Path(folder))
