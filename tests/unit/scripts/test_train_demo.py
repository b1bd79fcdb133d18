from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
import train_demo
from demo_evaluation import ngram_perplexities, perplexity
from demo_tokenizer import train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

SCRIPT = Path(train_demo.__file__)


@pytest.fixture(autouse=True)
def small_training(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A few steps of little text; torch's global settings are put back."""
    monkeypatch.setattr(train_demo, "TOKENIZER_DOCUMENTS", 100)
    monkeypatch.setattr(train_demo, "HELD_OUT_DOCUMENTS", 4)
    monkeypatch.setattr(train_demo, "BATCH_TOKENS", 128)
    monkeypatch.setattr(train_demo, "POOL_DOCUMENTS", 16)
    monkeypatch.setattr(train_demo, "REPORT_STEPS", 2)
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


@pytest.mark.long
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("one", 7), ("two", 7), ("other", 8)):
        train_demo.run(tmp_path / name, steps=3, seed=seed, threads=1)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert (
        files(tmp_path / "one")["model.safetensors"]
        != files(tmp_path / "other")["model.safetensors"]
    )


@pytest.mark.long
def test_it_learns_and_the_folder_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = train_demo.run(tmp_path, steps=20, seed=1, threads=1)
    assert report.perplexity < 0.5 * AutoTokenizer.from_pretrained(tmp_path).vocab_size
    assert report.tokens > 20 * 30
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == model.config.eos_token_id
    assert model.num_parameters() == report.parameters
    card = (tmp_path / "README.md").read_text()
    assert "--steps 20 --seed 1 --threads 1" in card
    assert f"{report.perplexity:.3f}" in card
    assert "step 20 of 20: mean loss" in capsys.readouterr().out


def test_batches_hold_whole_documents_padded_on_the_right() -> None:
    tokenizer = train_tokenizer(train_demo.demo_corpus.sample(0, "tokenizer", 100))
    pad, begin = tokenizer.token_to_id("<pad>"), tokenizer.token_to_id("<s>")
    batches = list(islice(train_demo.batches(tokenizer, 0), 30))
    for batch in batches:
        assert batch.shape[0] == 1 or batch.numel() <= train_demo.BATCH_TOKENS
        assert batch.shape[1] <= train_demo.CONTEXT
        assert (batch[:, 0] == begin).all()
        padding = batch == pad
        assert (padding[:, 1:] >= padding[:, :-1]).all(), "a token follows padding"
    again = islice(train_demo.batches(tokenizer, 0), 30)
    assert all(torch.equal(one, other) for one, other in zip(batches, again, strict=True))


def test_the_learning_rate_warms_up_and_falls() -> None:
    rates = [train_demo.learning_rate(step, 2000) for step in range(2000)]
    peak = train_demo.PEAK_LEARNING_RATE
    assert rates[: train_demo.WARM_UP_STEPS] == sorted(rates[: train_demo.WARM_UP_STEPS])
    assert rates[train_demo.WARM_UP_STEPS :] == sorted(
        rates[train_demo.WARM_UP_STEPS :], reverse=True
    )
    assert max(rates) == pytest.approx(peak)
    assert rates[-1] == pytest.approx(peak / 10, rel=1e-3)


def test_a_model_that_knows_nothing_is_as_perplexed_as_its_vocabulary_is_large() -> None:
    tokenizer = train_tokenizer(["abc"])
    model = LlamaForCausalLM(train_demo.model_config(tokenizer))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    assert perplexity(model, [[1, 5, 9], [1, 2]]) == pytest.approx(tokenizer.get_vocab_size())


def test_ngram_baselines_by_hand() -> None:
    """Three tokens; 0 1 0 1 was seen, 0 1 2 is asked."""
    unigram, bigram = ngram_perplexities([[0, 1, 0, 1]], [[0, 1, 2]], 3)
    chance = {0: 3 / 7, 1: 3 / 7, 2: 1 / 7}  # counts plus one
    assert unigram == pytest.approx(1 / math.sqrt(chance[1] * chance[2]))
    after_0, after_1 = (2 + chance[1]) / (2 + 1), (0 + chance[2]) / (1 + 1)
    assert bigram == pytest.approx(1 / math.sqrt(after_0 * after_1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--out"),
        (["--out", "x", "--steps", "0"], "must be at least 1"),
        (["--out", "x", "--steps", "many"], "invalid int value"),
        (["--out", str(SCRIPT)], "is a file; give a folder"),
    ],
)
def test_bad_usage_exits_2_with_a_line(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_demo.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        train_demo.main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_help_names_the_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_demo.py", "--help"])
    with pytest.raises(SystemExit) as caught:
        train_demo.main()
    assert caught.value.code == 0
    assert "--seed" in capsys.readouterr().out
