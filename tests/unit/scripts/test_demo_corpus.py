from __future__ import annotations

import json
import re
from itertools import pairwise
from random import Random
from typing import Any

import demo_corpus
import demo_tokenizer
import demo_tools
import pytest
from demo_plots import PLOTS, Plot
from demo_stories import GIRLS, story
from demo_talk import arithmetic
from transformers import AutoTokenizer

from kvrelay.models import resolve_model

SEEDS = range(300)
TURN = re.compile(r"<\|(user|assistant|system)\|>(.*?)</s>", re.DOTALL)


def test_a_seed_and_a_split_name_the_documents() -> None:
    first = demo_corpus.sample(0, "train", 50)
    assert demo_corpus.sample(0, "train", 50) == first
    assert demo_corpus.sample(0, "held-out", 50) != first
    assert demo_corpus.sample(1, "train", 50) != first


def test_documents_begin_end_and_read_as_english() -> None:
    for document in demo_corpus.sample(3, "test", 400):
        assert document.startswith("<s>")
        assert document.endswith("</s>")
        assert document.count("<s>") == 1
        assert "<tool_call>" in document or not re.search(r"[{}]", document), document
        assert not re.search(r"\b[Aa] [aeiou]|\ban (?!hour|AI)[^aeiou]", document), document
        assert "  " not in document


def test_conversations_are_written_as_the_chat_template_writes_them() -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("demo"))
    conversations = [text for text in demo_corpus.sample(4, "test", 200) if "<|user|>" in text]
    assert conversations
    for text in conversations:
        messages = [{"role": role, "content": content} for role, content in TURN.findall(text)]
        assert tokenizer.apply_chat_template(messages, tokenize=False) == text


def test_calls_of_functions_are_written_as_the_chat_template_writes_them() -> None:
    template = demo_tokenizer.as_transformers(demo_tokenizer.train_tokenizer(["a"]))
    for text in demo_tools.calls(5, "test", 100):
        (_, listed), *turns = TURN.findall(text)
        tools = [
            {"type": "function", "function": described(line)} for line in listed.splitlines()[1:]
        ]
        messages: list[dict[str, Any]] = []
        for role, content in turns:
            call = re.fullmatch(r"<tool_call>(.*)</tool_call>", content)
            if call is not None:
                function = json.loads(call[1])
                calls = [{"type": "function", "function": function}]
                messages.append({"role": role, "content": None, "tool_calls": calls})
                assert function["name"] in [tool["function"]["name"] for tool in tools]
            elif messages and "tool_calls" in messages[-1]:
                messages.append({"role": "tool", "content": content})
            else:
                messages.append({"role": role, "content": content})
        written = template.apply_chat_template(messages, tools=tools, tokenize=False)
        assert written == text


def described(line: str) -> dict[str, Any]:
    """The function that a line of the list describes."""
    found = re.fullmatch(r"(\w+)\((.*)\): (.*)", line)
    assert found is not None, line
    properties = {name: {"type": "string"} for name in found[2].split(", ")}
    return {
        "name": found[1],
        "description": found[3],
        "parameters": {"type": "object", "properties": properties},
    }


def test_stories_vary() -> None:
    assert len({story(Random(seed)).text for seed in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.topic)
def test_every_plot_has_variants_and_questions(plot: Plot) -> None:
    assert all(len(variants) >= 2 for variants in plot.sentences)
    assert len(plot.questions) >= 4


def test_names_colors_and_numbers_of_answers_come_from_the_story() -> None:
    for seed in SEEDS:
        tale = story(Random(seed))
        for asked, answer in tale.answers:
            if asked.startswith("What is the name of the") and answer.startswith("There is no"):
                continue
            words = set(re.findall(r"[A-Z][a-z]+|\d+", answer)) - {
                "The",
                "There",
                "It",
                "No",
                "Yes",
                "An",
                "They",
            }
            assert words <= set(re.findall(r"\w+", tale.text)), (tale.text, asked, answer)


def test_the_story_is_about_whom_it_was_asked_for() -> None:
    tale = story(Random(1), kind="cat", hero="Lily", avoid={"Tom"})
    assert "little cat" in tale.text
    assert "Lily" in tale.text
    assert "Lily" in GIRLS
    assert not re.search(r"\b[Hh]is name\b|Tom", tale.text)
    assert dict(tale.answers)["What is the name of the cat?"] == "The name of the cat is Lily."


def test_sums_are_right() -> None:
    checked = 0
    for seed in range(3000):
        _, answer = arithmetic(Random(seed))
        if match := re.fullmatch(r"(\d+) (plus|minus|times) (\d+) is (\d+)\.", answer):
            a, word, b, result = int(match[1]), match[2], int(match[3]), int(match[4])
            assert result == {"plus": a + b, "minus": a - b, "times": a * b}[word]
            checked += 1
    assert checked > 1000


def test_word_problems_are_right() -> None:
    checked = 0
    for seed in range(3000):
        asked, answer = arithmetic(Random(seed))
        if asked.startswith(tuple("0123456789")) or " has " not in asked:
            continue
        a, b = map(int, re.findall(r"\d+", asked))
        (result,) = map(int, re.findall(r"\d+", answer))
        assert result == (a + b if "more" in asked else a - b), (asked, answer)
        checked += 1
    assert checked > 100


def test_heroes_of_a_long_document_differ() -> None:
    documents = [text for text in demo_corpus.sample(5, "test", 6000) if "Story 12." in text]
    assert documents
    for text in documents:
        numbers = [int(number) for number in re.findall(r"Story (\d+)\. ", text)]
        assert all(after == before + 1 for before, after in pairwise(numbers))
