"""Answers that follow a grammar: always valid, always the same, and of no effect on others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import event, given, reject, settings
from support.guided_model import (
    DEMO,
    EOS,
    PROMPT,
    VOCAB,
    answer,
    guided_model,
    json_schema,
    params,
    request,
)
from support.json_schemas import json_schemas

from kvrelay.clock import ManualClock
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampling import compiled_grammars as grammars_module
from kvrelay.engine.sampling.compiled_grammars import Grammars
from kvrelay.engine.sampling.grammar import COMPILER, GrammarCompiler
from kvrelay.engine.sampling.grammar_time import REFILL, STORE_S, GrammarTime, Spending
from kvrelay.engine.sampling.sampler import Sampled, SampleRequest, sample
from kvrelay.engine.sampling.sequence_faults import SegmentsFailed, SequenceFault
from kvrelay.engine.sampling.token_masks import token_masks, unpacked
from kvrelay.engine.sequence_segment import Segment
from kvrelay.errors import Internal, InvalidArgument
from kvrelay.tokenizer.tokenizer import Tokenizer
from kvrelay.types.requests import Guidance, SamplingParams

TEXT = {"type": "string", "maxLength": 6}
PERSON = {
    "type": "object",
    "properties": {"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "optional": PERSON | {"required": []},
    "list": {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 3},
    "enum": {"enum": ["red", "green", 3, None, True]},
    "constant": {"const": {"a": [1, "two"]}},
    "choice": {"anyOf": [{"type": "boolean"}, {"type": "integer", "maximum": 99, "minimum": -9}]},
    "one of": {"oneOf": [{"const": "a"}, {"type": "integer", "minimum": 0, "maximum": 7}]},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "date": {"type": "string", "format": "date"},
    "number": {"type": "number", "minimum": -1, "maximum": 1},
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"enum": [1, 2]}, "next": {"$ref": "#/$defs/leaf"}},
                "required": ["v"],
                "additionalProperties": False,
            },
            "leaf": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
        "$ref": "#/$defs/node",
    },
    "tuple": {"type": "array", "prefixItems": [TEXT, {"type": "null"}], "items": False},
    "nested": {
        "type": "object",
        "properties": {"p": PERSON, "q": {"type": "array", "items": TEXT, "maxItems": 2}},
        "required": ["p", "q"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    folder = guided_model(tmp_path_factory.mktemp("guided"))
    runner = ModelRunner.load(str(folder), kv_bytes=1 << 23)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


def text_of(tokenizer: Tokenizer, tokens: tuple[int, ...]) -> str:
    assert tokens[-1] == EOS, "the answer did not end"
    assert all(0 <= token < tokenizer.vocab_size for token in tokens)
    return tokenizer.decode(tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_of_random_weights_is_valid_json(
    runner: ModelRunner, tokenizer: Tokenizer, name: str, temperature: float
) -> None:
    for seed in (1, 2):
        sampling = params(json_schema(SCHEMAS[name]), temperature=temperature, seed=seed)
        value = json.loads(text_of(tokenizer, answer(runner, sampling)))
        jsonschema.validate(value, SCHEMAS[name])


@settings(max_examples=25)
@given(schema=json_schemas())
def test_an_answer_to_any_schema_is_valid_json(
    runner: ModelRunner, tokenizer: Tokenizer, schema: dict[str, Any]
) -> None:
    follows(runner, tokenizer, schema)


@pytest.mark.long
@settings(max_examples=1000)
@given(schema=json_schemas())
def test_a_thousand_answers_are_valid_json(
    runner: ModelRunner, tokenizer: Tokenizer, schema: dict[str, Any]
) -> None:
    follows(runner, tokenizer, schema)


def follows(runner: ModelRunner, tokenizer: Tokenizer, schema: dict[str, Any]) -> None:
    """An answer that is far from the model's wishes ends, and is valid."""
    sampling = params(json_schema(schema), temperature=2.0, top_k=50, frequency_penalty=1.0)
    try:
        tokens = answer(runner, sampling)
    except InvalidArgument as error:
        # Such as members of oneOf that do not exclude each other.
        event(error.message.partition(":")[2][:60])
        reject()
    value = json.loads(text_of(tokenizer, tokens))
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)


def test_an_answer_matches_the_regular_expression_and_the_grammar(
    runner: ModelRunner, tokenizer: Tokenizer
) -> None:
    pattern = r"(yes|no)( [a-z]{1,5}){2}"
    text = text_of(tokenizer, answer(runner, params(Guidance("regex", pattern))))
    assert re.fullmatch(pattern, text)
    grammar = 'start: sum\nsum: NUM | NUM "+" NUM\nNUM: /[0-9]{1,3}/\n'
    text = text_of(tokenizer, answer(runner, params(Guidance("lark", grammar))))
    assert re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3})?", text)


@pytest.mark.parametrize("name", ["pattern", "choice", "tree"])
def test_an_answer_continues_after_any_token_as_it_would_have(
    runner: ModelRunner, name: str
) -> None:
    sampling = params(json_schema(SCHEMAS[name]), temperature=0.8, top_p=0.9, presence_penalty=0.3)
    whole = answer(runner, sampling)
    for emitted in range(len(whole)):
        assert answer(runner, sampling, emitted=whole[:emitted]) == whole


def test_the_draft_of_a_step_has_a_mask_at_each_place(runner: ModelRunner) -> None:
    """A step with drafts gives the tokens of single steps, whatever is drafted."""
    sampling = params(json_schema(PERSON), temperature=0.7)
    whole = answer(runner, sampling)
    blocks = range(runner.layout.blocks_for(700))
    chosen = np.random.default_rng(0)
    for right in (0, 1, 4):
        tokens = list(PROMPT)
        sample_request = request(runner, sampling, tokens, len(PROMPT))
        computed, done = 0, 0
        while done < len(whole):
            # Some right drafts, then a wrong one, an impossible one, and the end of the answer.
            draft = [*whole[done : done + right], int(chosen.integers(6, 2048)), 3, EOS]
            (sampled,) = runner.run(
                [
                    Segment(
                        [*tokens[computed:], *draft],
                        computed,
                        blocks,
                        replace(sample_request, token_ids=[*tokens, *draft]),
                        num_draft=len(draft),
                    )
                ]
            )
            new = [one.token_id for one in sampled][: len(whole) - done]
            assert len(new) > min(right, len(whole) - done - 1)
            assert tuple(new) == whole[done : done + len(new)]
            computed = len(tokens) + len(new) - 1
            tokens += new
            done += len(new)


def test_rows_without_guidance_do_not_change_beside_rows_with_it(runner: ModelRunner) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    tokens = list(PROMPT)
    free = [
        SampleRequest(SamplingParams(temperature=0.9, seed=row, logprobs=3), tokens, len(PROMPT))
        for row in range(2)
    ]
    guided = [
        request(runner, params(json_schema(PERSON), logprobs=3), tokens, len(PROMPT)),
        request(runner, params(Guidance("regex", "[a-z]+"), seed=5), tokens, len(PROMPT)),
    ]
    mixed = sample(logits, [free[0], guided[0], free[1], guided[1]])
    assert mixed[::2] == sample(logits[[0, 2]], free)
    assert mixed[1::2] == sample(logits[[1, 3]], guided)
    assert mixed[1::2] == [*sample(logits[1:2], guided[:1]), *sample(logits[3:], guided[1:])]
    first = mixed[1]
    assert isinstance(first, Sampled)
    assert first.logprobs is not None
    own = logits[1].log_softmax(0)
    assert first.logprobs.logprob == pytest.approx(float(own[first.token_id]))
    assert first.logprobs.top[0][1] == pytest.approx(float(own.max()))


def test_without_guidance_nothing_is_computed() -> None:
    plain = SampleRequest(SamplingParams(temperature=0), [1], 1)
    assert token_masks([plain, plain]) is None


def test_guidance_precedes_the_cuts_and_follows_bias_and_penalties(runner: ModelRunner) -> None:
    logits = torch.zeros(1, VOCAB)
    tokens = list(PROMPT)
    a, b, other = 70, 71, 523
    biased = ((a, -5.0), (b, 5.0), (other, 100.0))
    for options in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.9}):
        sampling = params(Guidance("regex", "[ab]"), logit_bias=biased, **options)
        (sampled,) = sample(logits, [request(runner, sampling, tokens, len(PROMPT))])
        assert isinstance(sampled, Sampled)
        assert sampled.token_id == b


# Every further token has more meanings, each of which the parser follows.
AMBIGUOUS = Guidance("lark", 'start: s "!"\ns: X | s s | s s s\nX: "~"')
TILDE = 99


def test_the_time_beyond_the_usual_is_bounded_and_comes_back() -> None:
    clock = ManualClock(0.0)
    allowance = GrammarTime(clock.now)
    spent = Spending(allowance, 1.0)
    assert spent.add(0.75)
    assert spent.add(0.25 + STORE_S / 2)
    assert not spent.add(STORE_S)
    # What is usual is still free.
    assert Spending(allowance, 1.0).add(1.0)
    assert not Spending(allowance, 1.0).add(1.001)
    assert allowance.is_over
    # What was taken beyond it is paid back first.
    clock.advance(STORE_S / REFILL / 2)
    assert allowance.is_over
    clock.advance(STORE_S / REFILL)
    assert allowance.take(STORE_S / 2)
    clock.advance(1e6)
    assert not allowance.take(STORE_S)


def test_an_answer_that_takes_too_long_to_resume_is_refused_and_others_go_on(
    runner: ModelRunner,
) -> None:
    """All of it would take hours."""
    resumed = [*PROMPT, *[TILDE] * 700]
    with pytest.raises(InvalidArgument, match=r"it took .* ms for one token"):
        runner.grammars.open(AMBIGUOUS, resumed, len(PROMPT), tenant="loud")
    # A long answer whose tokens take the usual time.
    letters = [*PROMPT, *[70] * 700]
    for tenant in ("loud", "quiet"):
        runner.grammars.open(Guidance("regex", "a*"), letters, len(PROMPT), tenant=tenant)


def test_answers_of_one_tenant_have_no_more_time_than_one_and_others_go_on(
    runner: ModelRunner,
) -> None:
    tokens = [*PROMPT, *[TILDE] * 40]
    slow, usual = params(AMBIGUOUS), params(Guidance("regex", "[a-z]{600}"))
    # Of two tenants. The second has a slow and a usual one.
    opened = [
        SampleRequest(
            sampling,
            prefix,
            len(PROMPT),
            runner.eos_token_ids,
            runner.grammars.open(sampling.guidance, prefix, len(PROMPT), tenant=tenant),
        )
        for tenant, sampling, prefix in (
            ("one", usual, list(PROMPT)),
            ("two", usual, list(PROMPT)),
            *(("two", slow, tokens) for _ in range(6)),
        )
        if sampling.guidance is not None
    ]
    for _ in range(300):
        masks = token_masks(opened)
        assert masks is not None
        if masks.failed:
            break
        for request_ in opened[2:]:
            request_.token_ids.append(TILDE)
    assert masks.failed.keys() <= set(range(2, len(opened)))
    assert all("for one token" in error.message for error in masks.failed.values())


@pytest.mark.parametrize(
    "source", [r"(\w{1,20} ){1,300}x", r"(#\w{1,25} ?){1,100}", r"(a|.){1,500}x"]
)
def test_what_a_grammar_remembers_of_other_answers_ends_none(
    runner: ModelRunner, source: str
) -> None:
    """Otherwise the limits of the library, which count it, refuse what they accepted before."""
    grammars, random, guidance = runner.grammars, Random(0), Guidance("regex", source)
    mask = np.empty((1, -(-VOCAB // 32)), np.int32)
    # It shares the grammar with the first answers, and goes on when they have filled it.
    early = grammars.open(guidance, PROMPT, len(PROMPT), "x")
    for number in range(150):
        tokens = list(PROMPT)
        matcher = grammars.open(guidance, tokens, len(PROMPT), "x")
        for place in range(60):
            assert matcher.fill(mask, tokens) is None
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if (token := random.choice(allowed.tolist())) == EOS:
                break
            tokens.append(token)
            if number % 2 and place == 30:
                # It continues on another worker.
                matcher = grammars.open(guidance, tokens, len(PROMPT), "x")
    assert early.fill(mask, tokens) is None


@pytest.mark.parametrize("source", [r"[ -~]*e[ -~]{300}x[ -~]*", r"(\w{1,20} ){1,300}x"])
def test_an_answer_goes_on_from_any_place_with_the_same_choice(
    runner: ModelRunner, source: str
) -> None:
    """On a worker whose grammar remembers nothing."""
    guidance, random, tokens = Guidance("regex", source), Random(0), list(PROMPT)
    mask = np.empty((1, -(-VOCAB // 32)), np.int32)
    matcher = runner.grammars.open(guidance, tokens, len(PROMPT), "whole", max_tokens=400)
    for place in range(250):
        assert matcher.fill(mask, tokens) is None, place
        if place % 10 == 0:
            other = np.empty_like(mask)
            fresh = runner.grammars.open(
                guidance, tokens, len(PROMPT), f"cut {place}", max_tokens=400
            )
            assert fresh.fill(other, tokens) is None, place
            assert np.array_equal(mask, other)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        tokens.append(random.choice([one for one in allowed.tolist() if one != EOS]))


def test_a_row_whose_tokens_break_the_grammar_fails_alone(runner: ModelRunner) -> None:
    sampling = params(Guidance("regex", "[a-c]{4}"), temperature=0.0)
    good = request(runner, sampling, list(PROMPT), len(PROMPT))
    bad = request(runner, sampling, list(PROMPT), len(PROMPT))
    bad = replace(bad, token_ids=[*PROMPT, 523])
    segments = [
        Segment(good.token_ids, 0, range(8), good),
        Segment(bad.token_ids, 0, range(8, 16), bad),
        Segment(PROMPT, 0, range(16, 24), SampleRequest(SamplingParams(temperature=0), PROMPT, 7)),
    ]
    with pytest.raises(SegmentsFailed) as caught:
        runner.run(segments)
    first, failed, free = caught.value.outcomes
    assert [first, free] == runner.run([segments[0], segments[2]])
    assert isinstance(failed, InvalidArgument)
    assert failed.field == "guidance"
    assert "token 523 at position 7 does not follow" in failed.message
    again = request(runner, sampling, list(PROMPT), len(PROMPT))
    with pytest.raises(InvalidArgument, match="does not follow"):
        runner.grammars.open(Guidance("regex", "a+"), [*PROMPT, 523], len(PROMPT), "")
    assert isinstance(sample(torch.zeros(1, VOCAB), [again])[0], Sampled)


def test_a_row_without_a_number_or_without_its_matcher_fails(runner: ModelRunner) -> None:
    sampling = params(Guidance("regex", "[ab]"))
    logits = torch.zeros(3, VOCAB)
    logits[0, 900] = torch.nan
    logits[1, [70, 71]] = -torch.inf
    guided = [request(runner, sampling, list(PROMPT), len(PROMPT)) for _ in range(3)]
    results = sample(logits, [*guided[:2], replace(guided[2], matcher=None)])
    assert [type(one) for one in results] == [SequenceFault, SequenceFault, Internal]


def test_when_the_grammar_is_complete_only_the_end_is_left(
    runner: ModelRunner, tokenizer: Tokenizer
) -> None:
    tokens = [*PROMPT, *tokenizer.encode("ab", add_special_tokens=False)]
    guided = request(runner, params(Guidance("regex", "ab|abc")), tokens, len(PROMPT))
    masks = token_masks([guided])
    assert masks is not None
    allowed = masks.applied(torch.zeros(1, VOCAB)).isfinite().nonzero()[:, 1].tolist()
    assert allowed == [EOS, *tokenizer.encode("c", add_special_tokens=False)]
    whole = replace(guided, token_ids=[*tokens, allowed[1]])
    masks = token_masks([whole])
    assert masks is not None
    assert masks.applied(torch.zeros(1, VOCAB)).isfinite().nonzero()[:, 1].tolist() == [EOS]


def test_words_of_a_mask_are_unpacked_alike_on_every_device() -> None:
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (3, 5)).astype(np.int32)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    assert unpacked(torch.from_numpy(words)).numpy().tolist() == bits.tolist()


def chain(rules: int) -> str:
    lines = ["start: r0", *(f"r{n}: r{n + 1}" for n in range(rules)), f'r{rules}: "a"']
    return "\n".join(lines)


HOSTILE = {
    "deep schema": Guidance("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "chain of rules": Guidance("lark", chain(4000)),
    "nested rules": Guidance("lark", "start: " + "(" * 30000 + '"a"' + ")" * 30000),
    "long pattern": Guidance("regex", "a?" * 30000),
    "pattern in a schema": json_schema({"type": "string", "pattern": "^" + "(a|b)?" * 9000}),
    "long constant": json_schema({"const": "x" * 60000}),
    "large enum": json_schema({"enum": list(range(40000))}),
    "many properties": json_schema({"properties": {f"p{n}": {} for n in range(4000)}}),
    "doubling": Guidance(
        "lark", 'start: A30\nA0: "a"?\n' + "\n".join(f"A{n + 1}: A{n} A{n}" for n in range(30))
    ),
    "multiples": json_schema({"type": "integer", "multipleOf": 999999937}),
    "product of choices": json_schema(
        {
            "type": "integer",
            "allOf": [{"anyOf": [{"minimum": n * 10 + m} for m in range(4)]} for n in range(12)],
        }
    ),
    "endless recursion": json_schema({"$ref": "#"}),
    "external reference": json_schema({"$ref": "http://127.0.0.1:1/schema.json"}),
    "file reference": json_schema({"$ref": "file:///etc/passwd"}),
    "unknown keyword": json_schema({"type": "array", "uniqueItems": True}),
    "lenient option": json_schema({"not": {}, "x-guidance": {"lenient": True}}),
    "not JSON": Guidance("json_schema", '{"type":'),
    "not a schema": Guidance("json_schema", "[]"),
    "not a pattern": Guidance("regex", "(a"),
    "not a grammar": Guidance("lark", "start: {{{"),
    "no answer": Guidance("lark", "start: start"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_or_wrong_grammar_is_refused_with_a_reason_in_one_line(
    runner: ModelRunner, name: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        runner.grammars.open(HOSTILE[name], [], 0, "")
    assert caught.value.field == "guidance"
    assert caught.value.message.startswith("guidance is not accepted: ")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("pattern", ["(a{1,1000}){1,1000}", ".*a.{200}", r"(\w{1,500} ){1,500}"])
def test_a_pattern_with_large_numbers_is_bounded_and_works(
    runner: ModelRunner, tokenizer: Tokenizer, pattern: str
) -> None:
    tokens = answer(runner, params(Guidance("regex", pattern)), max_tokens=40)
    assert tokens[0] != EOS


def test_a_model_without_end_or_tokenizer_refuses_guidance(tmp_path: Path) -> None:
    guidance = Guidance("regex", "a")
    refused = {
        "no tokenizer.json": Grammars(str(tmp_path), VOCAB, frozenset({EOS})),
        "no tokenizer.json; send": Grammars("", VOCAB, frozenset({EOS})),
        "no end-of-sequence token": Grammars(str(DEMO), VOCAB, frozenset({VOCAB})),
        "it has no end-of-sequence": Grammars(str(DEMO), VOCAB, frozenset()),
    }
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{}")
    refused["its tokenizer is not supported"] = Grammars(str(broken), VOCAB, frozenset({EOS}))
    for reason, grammars in refused.items():
        with pytest.raises(InvalidArgument, match=reason) as caught:
            grammars.open(guidance, [], 0, "")
        assert caught.value.field == "guidance"
        grammars.close()


def test_compiled_grammars_are_bounded_and_the_least_recent_goes_first(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(str(DEMO), VOCAB, frozenset({EOS}))
    try:
        for bound, most in (("MAX_SOURCES", 8), ("MAX_COMPILED", 2)):
            with monkeypatch.context() as patch:
                patch.setattr(grammars_module, bound, most)
                for source in ("aaa", "bbb", "aaa", "ccc"):
                    grammars.open(Guidance("regex", source), [], 0, "")
                assert [one.source for _, one in grammars._compiled] == ["aaa", "ccc"]
    finally:
        grammars.close()


def test_who_has_another_salt_does_not_see_by_the_time_that_a_grammar_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars, tried = Grammars(str(DEMO), VOCAB, frozenset({EOS})), []
    monkeypatch.setattr(grammars._trial, "check", tried.append)
    compiled = grammars._compiler.compile
    monkeypatch.setattr(
        grammars._compiler, "compile", lambda guidance: tried.append(guidance) or compiled(guidance)
    )
    try:
        asked = Guidance("regex", "a")
        for salt in ("", "x", "y", "x", ""):
            grammars.open(asked, [], 0, salt)
        assert tried == 3 * [asked, asked], "once on trial and once compiled for each salt"
    finally:
        grammars.close()


def test_after_the_warm_up_no_request_waits_for_the_vocabulary(tmp_path: Path) -> None:
    grammars, unable = (
        Grammars(folder, VOCAB, frozenset({EOS})) for folder in (str(DEMO), str(tmp_path))
    )
    try:
        grammars.warm_up()
        assert grammars._compiler._tokenizer is not None
        unable.warm_up()
        with pytest.raises(InvalidArgument, match=r"no tokenizer\.json"):
            unable.open(Guidance("regex", "a"), [], 0, "")
    finally:
        grammars.close()
        unable.close()


def test_only_guidance_that_another_compiler_has_tried_out_is_tried_out_again() -> None:
    grammars = Grammars(str(DEMO), VOCAB, frozenset({EOS}))
    try:
        grammars.warm_up()
        grammars.open(Guidance("regex", "a", tried_with=COMPILER), [], 0, "")
        assert grammars._trial._process is None
        grammars.open(Guidance("regex", "b", tried_with=f"{COMPILER}.1"), [], 0, "")
        assert grammars._trial._process is not None
    finally:
        grammars.close()


@pytest.mark.parametrize(
    ("schema", "text", "fits"),
    [
        ({"type": "integer"}, "7" * 300, True),
        ({"type": "integer", "minimum": 0, "maximum": 999}, "777", True),
        ({"type": "integer", "minimum": 0, "maximum": 999}, "7777", False),
        ({"type": "string"}, '"' + "a" * 300, True),
        ({"type": "string", "maxLength": 3}, '"aaaa', False),
    ],
)
def test_only_the_bounds_of_a_schema_bound_its_answers(
    schema: dict[str, Any], text: str, fits: bool
) -> None:
    """As the HTTP reference says: unbounded values have no end."""
    compiler = GrammarCompiler(DEMO, VOCAB, frozenset({EOS}))
    matcher = compiler.compile(Guidance("json_schema", json.dumps(schema)))
    token_ids = compiler.tokenizer.tokenize_str(text)
    assert (matcher.try_consume_tokens(token_ids) == len(token_ids)) == fits
