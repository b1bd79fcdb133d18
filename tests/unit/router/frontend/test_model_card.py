from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.config.model_sections import ModelConfig
from kvrelay.errors import ModelRefused
from kvrelay.tenants import ANONYMOUS
from kvrelay.types.requests import SamplingParams
from kvrelay.wire.inference import GenerateRequest, SamplingOptions
from router.frontend.model_card import ModelCard
from router.frontend.validation import admit_sampling


def write(folder: Path, **config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_folder_is_named_by_its_last_part(tmp_path: Path) -> None:
    folder = write(
        tmp_path, max_position_embeddings=128, vocab_size=10, architectures=["Qwen2ForCausalLM"]
    )
    card = ModelCard.load(folder, ModelConfig(path=folder, dtype="float32"))
    assert (card.info.id, card.info.dtype, card.eos_token_ids) == (
        tmp_path.name,
        "float32",
        frozenset(),
    )


def test_several_ends_of_text_and_the_generation_config_go_first(tmp_path: Path) -> None:
    folder = write(tmp_path, max_position_embeddings=128, vocab_size=10, eos_token_id=1)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert ModelCard.load(folder, ModelConfig()).eos_token_ids == {3, 4}


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config"])
def test_a_multimodal_model_has_the_sizes_of_its_language_model(tmp_path: Path, name: str) -> None:
    """Some keys may be outside, and those inside count."""
    inner = {"max_position_embeddings": 64, "vocab_size": 9, "eos_token_id": 5}
    folder = write(tmp_path, vocab_size=7, dtype="float16", **{name: inner})
    card = ModelCard.load(folder, ModelConfig())
    assert (card.info.max_model_len, card.vocab_size, card.eos_token_ids) == (64, 9, {5})
    folder = write(tmp_path, vocab_size=7, **{name: {"max_position_embeddings": 64}})
    assert ModelCard.load(folder, ModelConfig()).vocab_size == 7


def test_a_model_without_a_longest_sequence_needs_a_configured_one(tmp_path: Path) -> None:
    def ask(_: str) -> dict[str, Any]:
        return {"vocab_size": 10, "max_position_embeddings": None, "eos_token_id": 3}

    folder = write(tmp_path, vocab_size=10)
    card = ModelCard.load(folder, ModelConfig(max_model_len=77), ask)
    assert card.info.max_model_len == 77
    with pytest.raises(ModelRefused, match=r"set model\.max_model_len"):
        ModelCard.load(folder, ModelConfig(), ask)


@pytest.mark.parametrize(
    "content",
    [
        *(
            "",
            "[]",
            '{"vocab_size": 10}',
            '{"vocab_size": 10, "max_position_embeddings": "x"}',
            "[" * 10**5,
        ),
        '{"vocab_size": 0, "max_position_embeddings": 10}',
        '{"vocab_size": 10, "max_position_embeddings": 1e400}',
        '{"vocab_size": 10, "max_position_embeddings": 2147483648}',
        '{"vocab_size": 10, "max_position_embeddings": 10, "eos_token_id": "x"}',
        '{"vocab_size": 10, "max_position_embeddings": 10, "architectures": 7}',
        '{"text_config": []}',
    ],
)
def test_folder_that_cannot_be_read_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelRefused, match=r"config\.json"):
        ModelCard.load(str(tmp_path), ModelConfig())


def test_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"config\.json"):
        ModelCard.load(str(tmp_path), ModelConfig())


NUMBERS = {
    "temperature": st.floats(0, 100),
    "top_k": st.integers(0, 2**31 - 1),
    "top_p": st.floats(1e-9, 1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.01, 100),
}
SIZES = {"max_position_embeddings": 128, "vocab_size": 10}


@given(
    recommended=st.fixed_dictionaries({}, optional=NUMBERS),
    asked=st.fixed_dictionaries({}, optional=NUMBERS),
)
def test_a_request_leaves_open_what_the_model_recommends(
    tmp_path_factory: pytest.TempPathFactory, recommended: dict[str, Any], asked: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("model")
    write(folder, **SIZES)
    others = {"do_sample": True, "max_new_tokens": 7, "eos_token_id": 3, "top_k": None}
    (folder / "generation_config.json").write_text(json.dumps(others | recommended))
    card = ModelCard.load(str(folder), ModelConfig())
    request = GenerateRequest(prompt="hi", sampling=SamplingOptions(**asked))
    admitted = admit_sampling(request, "r", 10, 128, ANONYMOUS, card.sampling_defaults)
    wanted = SamplingParams(**recommended | asked)
    assert replace(admitted, seed=None) == wanted


def test_a_top_k_of_minus_one_is_off(tmp_path: Path) -> None:
    write(tmp_path, **SIZES)
    (tmp_path / "generation_config.json").write_text('{"top_k": -1}')
    assert ModelCard.load(str(tmp_path), ModelConfig()).sampling_defaults.top_k == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"temperature": True}, "temperature is True; it must be a number"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be a number"),
        ({"top_p": 7}, "top_p is 7.*allowed"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.*allowed"),
    ],
)
def test_what_no_request_could_ask_for_is_refused(
    tmp_path: Path, content: dict[str, Any], words: str
) -> None:
    write(tmp_path, **SIZES)
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(ModelRefused, match=rf"generation_config\.json: .*{words}"):
        ModelCard.load(str(tmp_path), ModelConfig())
