from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrelay.config.schema import ModelConfig
from kvrelay.errors import ModelRefused
from router.frontend.model_card import ModelCard


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
