from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import demo_corpus
import pytest
import quantisation_cost
import torch
from demo_evaluation import perplexity
from quantisation_cost import (
    LARGE_CHANNELS,
    Tokens,
    costs,
    first_difference,
    greedy,
    retrieved,
    same_tokens,
    story_questions,
    with_large_keys,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sequence_segment import Segment
from kvrelay.models import resolve_model

FOLDER = resolve_model("demo")


@pytest.fixture(scope="module")
def documents() -> list[Tokens]:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    texts = demo_corpus.sample(3, "held-out", 5)
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    runner = ModelRunner.load(FOLDER, dtype="float32", kv_bytes=quantisation_cost.KV_BYTES)
    yield runner
    runner.close()


def test_perplexity_is_that_of_the_models_card(
    runner: ModelRunner, documents: list[Tokens]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    assert quantisation_cost.perplexity(runner, documents) == pytest.approx(
        perplexity(model, documents), rel=1e-4
    )


def test_greedy_answers_are_those_of_generate_and_then_the_likeliest(
    runner: ModelRunner, documents: list[Tokens]
) -> None:
    prompts = [ids[: len(ids) // 2] for ids in documents]
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    expected = [
        model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]
    answers = greedy(runner, prompts, 20, batch=2)
    assert answers == expected
    tokens = sum(map(len, answers))
    assert same_tokens(runner, prompts, answers) == tokens
    answers[0][5] = answers[0][5] + 1
    assert same_tokens(runner, prompts, answers) < tokens


@pytest.mark.parametrize(
    ("answer", "expected", "position"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], 1),
        ([1], [1, 3], 1),
        ([1, 3], [1], 1),
        ([2], [1], 0),
    ],
)
def test_where_answers_part(answer: Tokens, expected: Tokens, position: int | None) -> None:
    assert first_difference(answer, expected) == position


def test_a_worse_model_costs_more(documents: list[Tokens], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantisation_cost, "ANSWER_TOKENS", 12)
    prompts = [ids[: len(ids) // 2] for ids in documents]
    questions = story_questions(AutoTokenizer.from_pretrained(FOLDER))[:6]
    variants = {"plain": {"dtype": "float32"}, "int8": {"kv_dtype": "int8"}}
    plain, int8 = costs(FOLDER, variants, documents, prompts, questions)
    assert plain.questions == 6
    assert 1 <= plain.retrieved <= 6
    assert (plain.same_tokens, plain.same_answers, plain.median_first_difference) == (
        plain.tokens,
        5,
        None,
    )
    assert plain.kv_bytes_per_token == 5 * 2 * 2 * 64 * 4
    assert int8.kv_bytes_per_token == 5 * 2 * 2 * (64 + 2)
    assert int8.tokens == plain.tokens
    assert int8.perplexity == pytest.approx(plain.perplexity, rel=0.02)
    assert int8.perplexity != plain.perplexity


def test_an_answer_is_retrieved_if_every_token_is_the_likeliest(runner: ModelRunner) -> None:
    (prompt, _), *_ = story_questions(AutoTokenizer.from_pretrained(FOLDER))
    (answer,) = greedy(runner, [prompt], 6, batch=1)
    wrong = [*answer[:-1], answer[-1] + 1]
    assert retrieved(runner, [(prompt, answer), (prompt, wrong)]) == 1


def test_large_key_channels_change_keys_and_no_result(
    documents: list[Tokens], tmp_path: Path
) -> None:
    """Factors that are powers of two change no rounding."""
    logits, keys = [], []
    for folder in (FOLDER, with_large_keys(FOLDER, tmp_path)):
        runner = ModelRunner.load(folder, kv_bytes=2**24, kernels="torch")
        blocks = range(runner.layout.blocks_for(len(documents[0])))
        logits.append(runner.forward([Segment(documents[0], 0, blocks)], range(len(documents[0]))))
        keys.append(runner.kv.layers[0].k[0].float().abs().amax((0, 1)))
        runner.close()
    assert torch.equal(*logits)
    larger = (keys[1] / keys[0]).round().tolist()
    assert larger == [16.0 if i % 32 in LARGE_CHANNELS else 1.0 for i in range(64)]


@pytest.mark.long
def test_the_command_prints_a_table_or_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantisation_cost, "ANSWER_TOKENS", 2)
    command = ["quantisation_cost.py", "--documents", "2", "--answers", "1"]
    monkeypatch.setattr(sys, "argv", command)
    quantisation_cost.main()
    assert "int8 KV" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "--json"])
    quantisation_cost.main()
    rows = json.loads(capsys.readouterr().out)
    variants = [*quantisation_cost.VARIANTS, *quantisation_cost.WITH_LARGE_KEYS]
    assert [row["variant"] for row in rows] == variants
    assert all(row["answers"] == 1 for row in rows)


@pytest.mark.parametrize(
    "arguments", [["--answers", "0"], ["--documents", "2", "--answers", "3"], ["--answers", "x"]]
)
def test_bad_usage_exits_2_with_a_line(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quantisation_cost.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        quantisation_cost.main()
    assert caught.value.code == 2
    assert "--answers" in capsys.readouterr().err
