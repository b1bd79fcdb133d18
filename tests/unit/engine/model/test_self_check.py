"""A model is held to transformers' own attention when it is loaded, in each dtype that it may
have.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from model_sweep import answers, build, generate, random_prompts
from safetensors.torch import load_file, save_file
from support.tiny_models import build as build_tiny

from kvrelay.engine.model import self_check
from kvrelay.engine.model.loader import load_model
from kvrelay.engine.runner import ModelRunner
from kvrelay.errors import ModelRefused

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, on small configurations
DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3_moe", "deepseek_v2", "granitemoe", "beam", "gpt_oss"]
)
def test_rounding_refuses_nothing(model_type: str, dtype: str, tmp_path: Path) -> None:
    """Routers of experts included, which choose others where two are nearly equal."""
    build(model_type, tmp_path)
    assert load_model(str(tmp_path), dtype=dtype).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", ["roberta", "xlm-roberta-xl"])
def test_positions_that_the_model_shifts_are_noticed(
    model_type: str, dtype: str, tmp_path: Path
) -> None:
    build(model_type, tmp_path)
    with pytest.raises(
        ModelRefused, match="computes other logits with paged attention than with transformers"
    ):
        load_model(str(tmp_path), dtype=dtype)


def wrong_scale(attend: Any, **options: Any) -> Any:
    return attend(**{**options, "scale": 1.5 * options["scale"]})


def no_past(attend: Any, **options: Any) -> Any:
    return attend(**{**options, "window": 1})


@pytest.mark.parametrize("wrong", [wrong_scale, no_past])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_that_is_off_is_noticed(
    dtype: str, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_tiny("llama", tmp_path)
    batch = self_check.TorchForward.batch

    def off(self: Any, step: Any) -> Any:
        made = batch(self, step)

        class Off:
            def attend(
                self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
            ) -> Any:
                return wrong(lambda **changed: made.attend(layer, q, k, v, **changed), **options)

        return Off()

    monkeypatch.setattr(self_check.TorchForward, "batch", off)
    with pytest.raises(ModelRefused, match="computes other logits"):
        load_model(str(folder), dtype=dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_told_as_that(value: float, tmp_path: Path) -> None:
    folder = build_tiny("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][0, 0] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match="logits that are not finite"):
        load_model(str(folder))


def test_models_that_drop_keywords_run_side_by_side(tmp_path: Path) -> None:
    """Two runners in two threads: neither finds the other's batch."""
    build("nemotron", tmp_path)
    prompts = random_prompts()
    runners = [
        ModelRunner.load(str(tmp_path), kv_bytes=8 << 20, kernels="torch", block_size=4)
        for _ in range(2)
    ]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda runner: answers(runner, prompts, 7), runners))
    assert found == [generate(tmp_path, prompts)] * 2


def test_tokens_that_the_configuration_names_are_left_out(tmp_path: Path) -> None:
    """Such as padding, and the place of an image, which a model treats in another way."""
    model = load_model(
        str(build_tiny("llama", tmp_path, pad_token_id=5, image_token_id=9, audio_token_index=17))
    ).model
    assert not {0, 1, 5, 9, 17} & set(
        self_check._token_ids(model.config, model.device).flatten().tolist()
    )


def test_a_cache_that_is_shorter_than_attention_is_noticed(tmp_path: Path) -> None:
    """Of moshi transformers keeps a window, and lets a prompt attend to all of it: chunks would
    change the answer.
    """
    build("moshi", tmp_path)
    with pytest.raises(
        ModelRefused,
        match="the cache of transformers keeps 8 tokens, but the attention window is 192",
    ):
        load_model(str(tmp_path))
