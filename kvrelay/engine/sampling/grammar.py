"""Compiles guidance for the vocabulary of one model, with llguidance. Imports no torch."""

from __future__ import annotations

import itertools
import json
import re
import secrets
import threading
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvrelay.engine.sampling.schema_ids import check_ids
from kvrelay.engine.sampling.schema_numbers import (
    check_values,
    exact_integer,
    with_exact_numbers,
)
from kvrelay.engine.sampling.schema_reasons import explained_schema
from kvrelay.errors import InvalidArgument
from kvrelay.types.requests import Guidance

# What compiles grammars here: where it is the same, a grammar behaves in the same way.
COMPILER = f"llguidance {version('llguidance')}"
# llguidance's own limits allow a grammar to take seconds and hundreds of megabytes.
LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=200_000,
    step_max_items=10_000,
    max_items_in_row=10_000,
    max_lexer_states=20_000,
    max_grammar_size=10_000,
    verbose_errors=False,
)
# Whitespace between two tokens of JSON: a space, or a new line with its indentation. Where any
# whitespace is allowed, a model can write it for ever.
WHITESPACE = r"( |\n[ \t]{0,32})"
# Processor time to try out one grammar.
CPU_S = 0.5
# Processor time for the allowed tokens of one place in an answer, where a grammar is tried out.
SLOW_MASK_S = 0.02
# Compiled before the first request.
SMALL = Guidance("json_schema", '{"type": "object"}', COMPILER)
# Characters of llguidance's reason in an error.
_MAX_REASON = 300
# Strings, regular expressions and comments of a Lark grammar, and names of special tokens.
_LARK = re.compile(
    r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\])+/|#[^\n]*|(?P<name><[^<>\s\[@][^<>\s]*>)',
    re.DOTALL,
)
# Names of special tokens in an error.
_MOST_NAMES = 10
# How a rule of a Lark grammar begins, and the reason of llguidance for one with a schema.
_RULE, _SCHEMA = re.compile(r"\s*[?!]?(\w+)[^:|]*:"), "failed to compile JSON schema: "
# How llguidance writes a place in a grammar, and how a line of the grammar that it shows begins.
_PLACE, _QUOTED = re.compile(r"(?:at )?(\d+)\((\d+)\): "), re.compile(r" *\d+ \| ")


class GrammarCompiler:
    """Compiles guidance for one vocabulary. Safe to call from any thread."""

    def __init__(self, folder: str, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """`vocab_size`: width of the model's logits. `folder`: empty for a model without files."""
        self._path = Path(folder) / "tokenizer.json"
        self._has_folder = bool(folder)
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        # Token ids of the special tokens by their names, known with the tokenizer.
        self._special: dict[str, int] = {}
        self._lock = threading.Lock()

    def compile(self, guidance: Guidance) -> LLMatcher:
        """Returns a matcher at the beginning of an answer, with masks of `tokenizer.vocab_size`
        bits.

        Raises InvalidArgument with llguidance's reason. A hostile grammar can end the process: see
        GrammarTrial.
        """
        tokenizer = self.tokenizer
        try:
            matcher = LLMatcher(
                tokenizer, _grammar(guidance, self._special), log_level=0, limits=LIMITS
            )
        except ValueError as error:
            raise refusal(_explained(str(error), guidance)) from error
        if matcher.is_error():
            raise refusal(_explained(matcher.get_error(), guidance))
        return matcher

    @property
    def tokenizer(self) -> LLTokenizer:
        """The vocabulary, read on first use. Raises InvalidArgument if the model cannot follow
        guidance.
        """
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            return self._tokenizer

    def _load(self) -> LLTokenizer:
        if not self._has_folder or not self._path.is_file():
            raise _unable("it has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_str(self._path.read_text(encoding="utf-8"))
            # The file may contain settings from the training.
            backend.no_truncation()
            backend.no_padding()
            size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
            ends = sorted(one for one in self._eos_token_ids if one < size)
            if not ends:
                raise _unable("it has no end-of-sequence token")
            description, self._special = _without_names(backend.to_str(), ends)
            return LLTokenizer(description, n_vocab=max(size, self._vocab_size), eos_token=ends)
        except (InvalidArgument, KeyboardInterrupt, SystemExit):
            raise
        # Both libraries raise plain Exception, and for a panic in Rust code a BaseException.
        except BaseException as error:
            raise _unable(f"its tokenizer is not supported: {error!s:.200}") from error


def _without_names(description: str, ends: Collection[int]) -> tuple[str, dict[str, int]]:
    """Returns a tokenizer.json whose special tokens have names that occur in no text, and their
    token ids by their real names. `ends`: further tokens that are special.

    llguidance tokenizes text that a grammar prescribes. Where the text contains the name of a
    special token, such as </s>, it would prescribe that token, which ends the answer or is not
    shown.
    """
    tokenizer = json.loads(description)
    model, secret = tokenizer["model"], secrets.token_hex(8)
    in_dict = isinstance(model["vocab"], dict)
    pieces = list(model["vocab"].items() if in_dict else map(tuple, model["vocab"]))
    # llguidance takes added tokens in angle brackets for special too.
    special = {
        one["content"]: one["id"]
        for one in tokenizer["added_tokens"]
        if one["special"] or re.fullmatch("<.*>", one["content"], re.DOTALL)
    }
    ids = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    ids |= {text: value if in_dict else place for place, (text, value) in enumerate(pieces)}
    special |= {text: token for text, token in ids.items() if token in ends}
    # Pieces of other tokens are text, whatever else they are used for.
    merges = model.get("merges", ())
    parts = {part for pair in merges for part in pair}
    names = {text: f"{secret}-{token}" for text, token in special.items() if text not in parts}
    for one in tokenizer["added_tokens"]:
        one["special"] = one["content"] in names
        one["content"] = names.get(one["content"], one["content"])
    renamed = [(names.get(text, text), value) for text, value in pieces]
    model["vocab"] = dict(renamed) if in_dict else renamed
    if merges:
        model["merges"] = [pair for pair in merges if "".join(pair) not in names]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(tokenizer), {text: special[text] for text in names}


def refusal(reason: str) -> InvalidArgument:
    """Returns the error for guidance that cannot be followed, with the reason in one line."""
    line = " ".join(reason.replace("<non-verbose/>", "").split())
    line = "the grammar allows no answer" if line.startswith("NoExtension") else line
    return InvalidArgument(f"guidance is not accepted: {line:.{_MAX_REASON}}", field="guidance")


def _explained(reason: str, guidance: Guidance) -> str:
    """Returns llguidance's reason why it does not compile a grammar, as the grammar's author needs
    it: without quotations, which are unreadable in one line, and with what to do.
    """
    lines = itertools.takewhile(lambda line: not _QUOTED.match(line), reason.splitlines())
    reason = "\n".join(lines)
    before, found, quoted = reason.partition("regex parse error:\n")
    if found:
        reason = f"{before}regular expression: {quoted.rpartition('error: ')[2]}"
    if guidance.kind == "json_schema":
        reason = explained_schema(reason, guidance.source)
    if guidance.kind == "regex":
        # llguidance makes a grammar of the expression. What comes first is of that grammar.
        reason = reason.rpartition("(in regex): ")[2]
    if (place := _PLACE.match(reason)) is not None:
        reason = _placed(reason[place.end() :], int(place[1]), int(place[2]), guidance.source)
    if guidance.kind == "lark" and "::=" in guidance.source:
        reason += "; rules are written as in Lark, name: ..., not name ::= ..."
    # The names of all tokens follow, which are not those of the model.
    reason = reason.partition("; following special tokens are available")[0]
    if "too big" in reason:
        reason += "; use fewer or simpler rules, patterns and limits of numbers"
    return reason


def _placed(reason: str, line: int, column: int, lark: str) -> str:
    """Returns a reason with its place in a Lark grammar. A schema there has places of its own."""
    first, *rest = [*lark.split("\n")[line - 1 :], ""]
    if reason.startswith(_SCHEMA):
        schema = "\n".join([first[column - 1 :], *rest]).partition("%json")[2]
        reason = explained_schema(reason.removeprefix(_SCHEMA), schema)
        if (rule := _RULE.match(first)) is not None:
            return f"rule {rule[1]}: {reason}"
    return f"line {line}, column {column}: {reason}"


def exact_json(source: str) -> Any:
    """Returns the JSON value of a schema. Raises ValueError for invalid JSON, and for a schema that
    llguidance would take for another: with a number that it would replace, or with two parts of
    the same $id.
    """
    try:
        schema = json.loads(source, parse_int=exact_integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"the schema is not JSON: {error}") from error
    check_ids(schema)
    check_values(schema)
    return schema


def _unable(reason: str) -> InvalidArgument:
    return InvalidArgument(
        f"this model cannot follow guidance: {reason}; send the request without guidance",
        field="guidance",
    )


def _grammar(guidance: Guidance, special: Mapping[str, int]) -> str:
    """Returns the grammar in llguidance's own format. Raises ValueError for invalid JSON, and for a
    special token that the model does not have. special: token ids by name.
    """
    match guidance.kind:
        case "json_schema":
            if not isinstance(exact_json(guidance.source), dict):
                raise ValueError("the schema is not a JSON object")
            # A schema may contain options for llguidance. None of them may drop keywords.
            grammar = LLMatcher.grammar_from_json_schema(
                with_exact_numbers(guidance.source),
                defaults={"whitespace_pattern": WHITESPACE},
                overrides={"lenient": False},
            )
            # llguidance has read and written the numbers, and reads them again.
            return with_exact_numbers(grammar)
        case "regex":
            return LLMatcher.grammar_from_regex(guidance.source)
        case "lark":
            return LLMatcher.grammar_from_lark(_with_token_ids(guidance.source, special))


def _with_token_ids(lark: str, special: Mapping[str, int]) -> str:
    """Returns a Lark grammar with special tokens by number, <[7]> instead of <|user|>."""

    def numbered(found: re.Match[str]) -> str:
        name = found["name"]
        if name is None:
            return found[0]
        if name not in special:
            known = ", ".join(sorted(special)[:_MOST_NAMES])
            raise ValueError(f"{name:.60} is no special token of this model; it has {known}")
        return f"<[{special[name]}]>"

    return _LARK.sub(numbered, lark)
