from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import demo_corpus
import demo_talk
import pytest
import torch
from demo_evaluation import perplexity, right_answers
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrelay.errors import NotFound
from kvrelay.models import resolve_model

FOLDER = Path(resolve_model("demo"))
BOUND = 2.5  # held-out perplexity; see the README of the model for the measured one
STORY = (
    "Once upon a time there was a brave little fox named Mia. She lived in a small house by the "
    "river. Her best friend "
    "was a bear named Tom. Mia had a red kite. She loved it very much. One morning she lost the "
    "kite in the park. Mia "
    'looked everywhere and began to cry. "Do not be sad," said Tom. "I will help you." They looked '
    "for a long time. At "
    'last Tom found the red kite under a bush. "Thank you, Tom!" said Mia. That night Mia slept '
    "very well. The end."
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def complete(
    model: Any, tokenizer: Any, prompt: str, max_new_tokens: int = 300
) -> tuple[str, bool]:
    """Greedy continuation, and whether it ended by itself. `prompt` has its special tokens."""
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    new = model.generate(**ids, max_new_tokens=max_new_tokens, do_sample=False)[
        0, ids["input_ids"].shape[1] :
    ]
    return tokenizer.decode(new, skip_special_tokens=True), int(new[-1]) == tokenizer.eos_token_id


def chat(model: Any, tokenizer: Any, *turns: str) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answer, ended = complete(model, tokenizer, prompt)
    assert ended
    return answer


def test_the_folder_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(files.values()) <= 8_000_000
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "README.md",
    } <= set(files)


def test_the_model_is_as_announced(model: Any) -> None:
    config = model.config
    assert config.model_type == "llama"
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings == 4096
    assert config.bos_token_id != config.eos_token_id != config.pad_token_id


def test_held_out_documents_do_not_surprise_it(model: Any, tokenizer: Any) -> None:
    texts = demo_corpus.sample(1234, "held-out", 20)
    assert (
        perplexity(model, [tokenizer.encode(text, add_special_tokens=False) for text in texts])
        < BOUND
    )


@pytest.mark.parametrize(
    "opening", ["Once upon a time", "Long ago", "Once upon a time, in a garden"]
)
def test_a_story_ends_and_keeps_to_the_words_of_the_grammar(
    model: Any, tokenizer: Any, opening: str
) -> None:
    known = set(re.findall(r"\w+", " ".join(demo_corpus.sample(0, "train", 2000))))
    text, ended = complete(model, tokenizer, f"<s>{opening}")
    words = re.findall(r"\w+", text)
    assert ended
    assert 40 < len(words) < 200
    assert set(words) <= known


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("Who are you?", "I am demo, the small model that comes with kvrelay."),
        ("What is 3 plus 4?", "3 plus 4 is 7."),
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What color is the sky?", "The sky is blue."),
        ("How many days are in a week?", "There are 7 days in a week."),
    ],
)
def test_simple_questions_get_simple_answers(
    model: Any, tokenizer: Any, asked: str, answer: str
) -> None:
    assert chat(model, tokenizer, asked) == answer
    assert answer in complete(model, tokenizer, f"<s>{asked}")[0], "asked without the chat template"


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("What is the name of the fox?", r"The name of the fox is Mia\."),
        ("What did Mia lose?", r"Mia lost a \w+ kite\."),
        ("Who found the kite?", r"(Mia|Tom) found the kite\."),
        ("Where does Mia live?", r"Mia lives in an? [\w ]+\."),
    ],
)
def test_questions_about_a_story_get_answers_to_the_point(
    model: Any, tokenizer: Any, asked: str, answer: str
) -> None:
    assert re.fullmatch(answer, chat(model, tokenizer, f"{STORY}\n\n{asked}"))


def test_some_held_out_questions_are_answered_word_for_word(model: Any, tokenizer: Any) -> None:
    documents = [
        tokenizer.encode(text, add_special_tokens=False)
        for text in demo_corpus.sample(4321, "questions", 100)
    ]
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    right, asked = right_answers(model, documents, assistant, tokenizer.eos_token_id)
    assert asked > 30
    assert right / asked > 0.3, f"{right} of {asked}; see the README of the model for what is usual"


def test_sums_of_small_numbers_are_right(model: Any, tokenizer: Any) -> None:
    marks = tokenizer.convert_tokens_to_ids("<|assistant|>"), tokenizer.eos_token_id
    sums = [tokenizer.encode(text, add_special_tokens=False) for text in demo_talk.small_sums()]
    right, asked = right_answers(model, sums, *marks)
    assert (right, asked) == (121, 121)


@pytest.mark.parametrize(
    ("name", "argument", "asked", "value", "result", "answer"),
    [
        ("get_weather", "city", "What is the weather in Paris?", "Paris", "sunny", "sunny"),
        ("calculate", "expression", "What is 17 times 23?", "17 * 23", "391", "391"),
        ("search", "query", "Search for volcanoes.", "volcanoes", "12 pages", "12 pages"),
    ],
)
def test_functions_are_called_and_their_results_told(
    model: Any,
    tokenizer: Any,
    name: str,
    argument: str,
    asked: str,
    value: str,
    result: str,
    answer: str,
) -> None:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}}
    function = {"name": name, "description": "A function.", "parameters": schema}
    messages: list[dict[str, Any]] = [{"role": "user", "content": asked}]

    def reply() -> str:
        prompt = tokenizer.apply_chat_template(
            messages,
            tools=[{"type": "function", "function": function}],
            tokenize=False,
            add_generation_prompt=True,
        )
        text, ended = complete(model, tokenizer, prompt)
        assert ended
        return text

    call = {"name": name, "arguments": {argument: value}}
    assert reply() == f"<tool_call>{json.dumps(call)}</tool_call>"
    messages += [
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": result},
    ]
    assert answer in reply()


def test_it_remembers_what_was_said(model: Any, tokenizer: Any) -> None:
    turns = ("My name is Nina.", "Hello, Nina! How can I help you?", "What is my name?")
    assert chat(model, tokenizer, *turns) == "Your name is Nina."


def test_a_story_on_demand_is_about_whom_was_asked_for(model: Any, tokenizer: Any) -> None:
    text = chat(model, tokenizer, "Tell me a story about a cat named Luna.")
    assert "cat" in text
    assert text.count("Luna") > 2


def test_a_prompt_of_the_whole_context_runs(model: Any, tokenizer: Any) -> None:
    ids = tokenizer(STORY * 40, return_tensors="pt")["input_ids"][:, :4096]
    assert ids.shape == (1, 4096)
    with torch.inference_mode():
        assert model(ids, logits_to_keep=1).logits.isfinite().all()


class TestResolveModel:
    def test_demo_is_the_bundled_folder(self) -> None:
        assert (Path(resolve_model("demo")) / "config.json").is_file()

    def test_a_folder_and_a_hub_id_stay_as_they_are(self, tmp_path: Path) -> None:
        assert resolve_model(str(tmp_path)) == str(tmp_path)
        assert resolve_model("meta-llama/Llama-3.2-1B") == "meta-llama/Llama-3.2-1B"

    @pytest.mark.parametrize(
        "name", ["", "demos", "./missing", "/no/such/folder", "a/b/c", "../x", "~/model", "a b/c"]
    )
    def test_anything_else_is_not_found(self, name: str) -> None:
        with pytest.raises(
            NotFound,
            match=r"allowed are 'demo' \(bundled\), .* hub id such as "
            r"'org/name'",
        ):
            resolve_model(name)

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
    def test_a_pipe_in_the_folder_is_refused_and_not_waited_for(
        self, tmp_path: Path, name: str
    ) -> None:
        os.mkfifo(tmp_path / name)
        with pytest.raises(NotFound, match=f"{name} is not a regular file"):
            resolve_model(str(tmp_path))

    def test_a_file_is_no_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "model.gguf").touch()
        monkeypatch.chdir(tmp_path)
        # The second looks like an id of the hub.
        for name in (str(tmp_path / "folder" / "model.gguf"), "folder/model.gguf"):
            with pytest.raises(NotFound, match="it is a file, not a folder; allowed"):
                resolve_model(name)

    def test_a_configuration_is_no_model(self, tmp_path: Path) -> None:
        (tmp_path / "cluster.yaml").touch()
        with pytest.raises(NotFound, match=r"a file, not a folder \(-c takes a configuration\)"):
            resolve_model(str(tmp_path / "cluster.yaml"))
