"""Latent attention (MLA) keeps the latent vectors of tokens, and K and V where they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ragged_sequences import RaggedSequences

from kvrelay.config.schema import ClusterConfig
from kvrelay.engine.attention import latent_attention
from kvrelay.engine.attention.latent_attention import Absorbed, absorbed
from kvrelay.engine.model.loader import load_model
from kvrelay.engine.runner import ModelRunner
from kvrelay.types.kv_layout import LayerKv

LATENT = LayerKv(1, 24, 16, v_in_k=True)
EXPANDED = LayerKv(4, 16, 12)
PROMPTS = [[9, 4, 77, 23, 5] * 6, [3, 4, 5]]


def answers(folder: Path, kernels: Any, *, latents: bool = True) -> list[list[int]]:
    runner = ModelRunner.load(
        str(folder), kv_bytes=1 << 20, block_size=16, kernels=kernels, latents=latents
    )
    assert runner.layout.layers[0] == (LATENT if latents else EXPANDED)
    running = RaggedSequences(runner, PROMPTS, chunk=7, contiguous=False)
    while not running.done:
        running.step()
    return running.tokens


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_answers_are_those_of_k_and_v(tiny_model: Callable[[str], Path], kernels: str) -> None:
    folder = tiny_model("deepseek_v3")
    assert answers(folder, kernels) == answers(folder, kernels, latents=False)


def test_the_absorbed_matrices_are_kept_once(tiny_model: Callable[[str], Path]) -> None:
    model = load_model(str(tiny_model("deepseek_v3"))).model
    expanded = load_model(str(tiny_model("deepseek_v3")), latents=False).model
    layers = [one for one in model.modules() if absorbed(one) is not None]
    assert len(layers) == 2
    assert not any("kv_b_proj" in name for name, _ in model.named_parameters())
    assert sum("kv_b_proj" in name for name, _ in expanded.named_parameters()) == 2
    sizes = [
        sum(tensor.nbytes for tensor in (*one.parameters(), *one.buffers()))
        for one in (model, expanded)
    ]
    assert sizes[0] == sizes[1]


def test_a_model_that_latents_do_not_fit_keeps_k_and_v(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class of transformers may use the same names for something else."""
    folder = tiny_model("deepseek_v3")
    expected = answers(folder, "torch", latents=False)
    query = Absorbed.query
    monkeypatch.setattr(Absorbed, "query", lambda self, one: 1.1 * query(self, one))
    loaded = load_model(str(folder))
    assert loaded.kv_layers[0] == EXPANDED
    assert not any(absorbed(one) is not None for one in loaded.model.modules())
    runner = ModelRunner.of(loaded, kv_bytes=1 << 20, block_size=16, kernels="torch")
    running = RaggedSequences(runner, PROMPTS, chunk=7, contiguous=False)
    while not running.done:
        running.step()
    assert running.tokens == expected


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
def test_other_attention_is_left_alone(
    tiny_model: Callable[[str], Path], architecture: str
) -> None:
    model = load_model(str(tiny_model(architecture))).model
    assert not latent_attention.absorb(model, frozenset())


def test_pools_with_ranks_keep_k_and_v() -> None:
    """Both pools, since they exchange blocks."""
    assert ClusterConfig().keeps_latents
    for pool in ("prefill", "decode"):
        config = ClusterConfig.model_validate({pool: {"tensor_parallel": 2}})
        assert not config.keeps_latents


def test_scores_and_sums_are_those_of_the_expanded_vectors() -> None:
    torch.manual_seed(0)
    heads, k_dim, turned, v_dim, rank, tokens = 3, 8, 4, 6, 5, 7

    class Layer(torch.nn.Module):
        qk_nope_head_dim, v_head_dim = k_dim, v_dim
        kv_b_proj = torch.nn.Linear(rank, heads * (k_dim + v_dim), bias=False)

    made = Absorbed(Layer())
    latent = torch.randn(tokens, rank)
    k, v = Layer.kv_b_proj(latent).view(tokens, heads, k_dim + v_dim).split([k_dim, v_dim], -1)
    query = torch.randn(1, heads, tokens, k_dim + turned)
    plain = made.query(query)[..., :rank] @ latent.T
    torch.testing.assert_close(plain[0], query[0, ..., :k_dim] @ k.permute(1, 2, 0))
    torch.testing.assert_close(made.query(query)[..., rank:], query[..., k_dim:])
    weights = torch.rand(1, heads, tokens, tokens)
    summed = (weights @ latent).transpose(1, 2)
    expected = (weights[0] @ v.transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(made.output(summed)[0], expected)
