"""Text that a grammar prescribes is written by tokens of text, also where it contains the name of a
special token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvrelay.engine.sampling.grammar import GrammarCompiler
from kvrelay.errors import InvalidArgument
from kvrelay.types.requests import Guidance

SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>", "<tool>")
# Added to the vocabulary, but not as special tokens.
PLAIN = ("</s>", "<tool>")
EOS = 2
LETTERS = sorted(set('"\\<>/|_,:[]{}0123456789 abcdefghijklmnopqrstuvwxyz'))
MODELS: dict[str, Callable[[], models.Model]] = {
    "BPE": lambda: models.BPE(
        vocab={one: number for number, one in enumerate([*SPECIAL, *LETTERS, "se", "er"])},
        merges=[("s", "e"), ("e", "r")],
        unk_token="<unk>",
    ),
    "Unigram": lambda: models.Unigram(
        [(one, -float(number)) for number, one in enumerate([*SPECIAL, *LETTERS, "user"])],
        unk_id=0,
        byte_fallback=False,
    ),
    "without": lambda: models.BPE(
        vocab={one: number for number, one in enumerate(LETTERS)}, merges=[]
    ),
    "merged": lambda: models.BPE(
        vocab={one: number for number, one in enumerate([*SPECIAL, *LETTERS, "</", "s>"])},
        merges=[("<", "/"), ("s", ">"), ("</", "s>")],
    ),
}


def compiler(kind: str, folder: Path) -> tuple[GrammarCompiler, int]:
    """A tokenizer whose special tokens are in the vocabulary of its model, or in none."""
    tokenizer = Tokenizer(MODELS[kind]())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([one for one in SPECIAL if one not in PLAIN])
    tokenizer.add_tokens(list(PLAIN))
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokenizer.token_to_id("</s>")
    return GrammarCompiler(str(folder), tokenizer.get_vocab_size(), frozenset({eos})), eos


def written(compiled: GrammarCompiler, matcher: LLMatcher, eos: int, random: Random) -> str:
    """An answer of allowed tokens, drawn at random."""
    tokenizer, answer = compiled.tokenizer, list[int]()
    mask = np.zeros((tokenizer.vocab_size + 31) // 32, np.int32)
    while True:
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = [one for one in range(tokenizer.vocab_size) if mask[one // 32] >> one % 32 & 1]
        answer.append(random.choice(allowed))
        if answer[-1] == eos:
            return tokenizer.decode_str(answer[:-1])
        assert matcher.try_consume_tokens(answer[-1:]) == 1


@pytest.fixture(params=MODELS)
def compiled(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[GrammarCompiler, int]:
    return compiler(request.param, tmp_path)


def test_text_with_names_of_special_tokens(compiled: tuple[GrammarCompiler, int]) -> None:
    grammars, eos = compiled

    @given(
        st.lists(st.sampled_from([*SPECIAL, "a", "<", "user", "|>"]), min_size=1).map("".join),
        st.sampled_from(["enum", "regex", "lark"]),
        st.randoms(use_true_random=False),
    )
    def is_written(text: str, kind: str, random: Random) -> None:
        quoted = json.dumps(text)
        guidance, answer = {
            "enum": (Guidance("json_schema", json.dumps({"enum": [text]})), quoted),
            "regex": (Guidance("regex", re.escape(text)), text),
            "lark": (Guidance("lark", f"start: {quoted}"), text),
        }[kind]
        assert written(grammars, grammars.compile(guidance), eos, random) == answer

    is_written()


def test_a_special_token_that_others_are_made_of_keeps_its_name(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"!": 0, "a": 1, "!!": 2, "$": 3}, merges=[("!", "!")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["!", "$"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    grammars = GrammarCompiler(str(tmp_path), 4, frozenset({3}))
    matcher = grammars.compile(Guidance("regex", "a!!a"))
    assert written(grammars, matcher, 3, Random(0)) == "a!!a"


def test_a_lark_grammar_names_special_tokens(compiled: tuple[GrammarCompiler, int]) -> None:
    grammars, _ = compiled
    user = grammars.tokenizer.tokenize_str("a")
    source = r"""
// <none> of this "<none>
start: <|user|> "<|user|>" /a<|user|>\/"/ other  # <none>
other: "\"<none>"
"""
    matcher = grammars.compile(Guidance("lark", source))
    mask = np.zeros((grammars.tokenizer.vocab_size + 31) // 32, np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    (first,) = [one for one in range(len(mask) * 32) if mask[one // 32] >> one % 32 & 1]
    assert grammars.tokenizer.is_special_token(first)
    assert matcher.try_consume_tokens([first, *user]) == 1
    text = '<|user|>a<|user|>/""<none>'
    token_ids = [one for letter in text for one in grammars.tokenizer.tokenize_str(letter)]
    assert matcher.try_consume_tokens(token_ids) > 0


@pytest.mark.parametrize(
    ("source", "first"),
    [
        ('start: /a\n<b>/ "c"', "a"),
        ('start: /a\n"/ <|user|> "z"', "a"),
        ("start: /a\n#b/ <|user|>", "a"),
        ('A: /b\n"<user>\n/x\nstart: A', "b"),
        ("start: <tool> /a/", "<tool>"),
    ],
)
def test_names_in_other_places_of_a_lark_grammar(
    compiled: tuple[GrammarCompiler, int], source: str, first: str
) -> None:
    grammars, _ = compiled
    matcher = grammars.compile(Guidance("lark", source))
    mask = np.zeros((grammars.tokenizer.vocab_size + 31) // 32, np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    (token,) = [one for one in range(len(mask) * 32) if mask[one // 32] >> one % 32 & 1]
    assert grammars.tokenizer.is_special_token(token) == first.startswith("<")
    if not first.startswith("<"):
        assert grammars.tokenizer.decode_str([token]) == first


def test_a_lark_grammar_with_an_unknown_special_token(
    compiled: tuple[GrammarCompiler, int],
) -> None:
    with pytest.raises(
        InvalidArgument,
        match=r"<none> is no special token of this model; it has </s>, <s>, <tool>, <unk>",
    ):
        compiled[0].compile(Guidance("lark", "start: <none>"))
