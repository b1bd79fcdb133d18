from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaConfig

from kvrelay.bench import reference_model
from kvrelay.bench.cost import model_cost

TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=128,
)


def test_a_model_with_a_word_for_each_token(tmp_path: Path) -> None:
    reference_model.write_model(tmp_path, TINY)
    cost = model_cost(str(tmp_path))
    assert cost.dtype == "bfloat16"
    assert cost.head == 64 * 32
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("t3 t63 t0")["input_ids"] == [3, 63, 0]
    assert tokenizer.decode([5, 6]) == "t5 t6"


def test_the_same_weights_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        reference_model.write_model(tmp_path / name, TINY)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert first == second


def test_it_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(reference_model, "_CONFIG", TINY)
    folder = reference_model.reference_model()
    assert folder == tmp_path / "kvrelay" / "m200"
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert reference_model.reference_model() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert list(folder.parent.iterdir()) == [folder]


def test_another_process_may_write_it_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(reference_model, "_CONFIG", TINY)
    write = reference_model.write_model

    def written_twice(folder: Path, config: LlamaConfig) -> None:
        monkeypatch.setattr(reference_model, "write_model", write)
        assert reference_model.reference_model().exists()
        write(folder, config)

    monkeypatch.setattr(reference_model, "write_model", written_twice)
    folder = reference_model.reference_model()
    assert list(folder.parent.iterdir()) == [folder]


def test_m200_is_what_the_figures_speak_of() -> None:
    config = reference_model._CONFIG
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (
        16,
        1024,
        2816,
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (16, 4, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings) == (
        8192,
        8192,
        False,
    )
