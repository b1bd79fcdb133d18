"""Request bodies over the whole range of the request models: each field at the edges of what its
schema allows, and beside it. Made for a real cluster, so answers are short.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from pydantic import BaseModel

from router.api.http.chat.template_variables import MAX_TEMPLATE_KWARGS
from router.api.http.dialects.anthropic.request_models import CountTokensRequest, MessagesRequest
from router.api.http.dialects.openai.request_models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from router.api.http.dialects.responses.request_models import ResponsesRequest

Json = dict[str, Any]
Any_ = st.SearchStrategy[Any]

MODELS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
# The smallest body that is served, for each route.
USER = [{"role": "user", "content": "Hello."}]
SMALL: dict[str, Json] = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 4},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4},
    "/v1/responses": {"input": "Hello.", "max_output_tokens": 4},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": USER},
    "/tokenize": {"prompt": "Hello."},
    "/detokenize": {"tokens": [5, 6]},
}
# Fields that a generated value may not fill, because an answer would have thousands of tokens.
_SHORT = ("max_tokens", "max_output_tokens", "max_completion_tokens")

# Any character, with those that texts and grammars stumble over more often.
characters = st.one_of(
    st.characters(codec="utf-8"),
    st.sampled_from("\0\r\n\t\"'\\/{}[]()<>|%$#\u2028\ufeff\ufffd\u200d\u0130\U0001f468\U0010ffff"),
)
texts = st.text(characters, max_size=24)
integers = st.one_of(
    st.integers(-2, 70),
    st.sampled_from(
        [s * (2**n + d) for n in (15, 31, 32, 53, 63, 64) for d in (-1, 0) for s in (1, -1)]
    ),
    st.integers(),
)
numbers = st.one_of(integers, st.floats(allow_nan=False, allow_infinity=False))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)
    ),
    max_leaves=8,
)  # fmt: skip
# Names that a template, its functions or Python have.
_TAKEN = (
    *("messages", "tools", "documents", "bos_token", "add_generation_prompt", "chat_template"),
    *("self", "loop", "range", "namespace", "raise_exception", "strftime_now", "dict", "cycler"),
    *("enable_thinking", "thinking", "reasoning_effort", "tojson", "true", "none", "caller"),
    *("__class__", "__globals__", "varargs", "kwargs", "context", "environment", "lipsum"),
)
template_kwargs = st.one_of(
    st.dictionaries(st.one_of(st.sampled_from(_TAKEN), texts), values, max_size=5),
    st.sampled_from([MAX_TEMPLATE_KWARGS - 9, MAX_TEMPLATE_KWARGS]).map(lambda n: {"a": "x" * n}),
)

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_REFS = ("#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/$defs/no", "#/a~1b", "http://x/y", "")


@st.composite
def schemas(draw: st.DrawFn, depth: int = 3) -> Any:
    """A JSON schema, or nearly one: contradictory, recursive, with keywords of the wrong type."""
    inner = schemas(depth - 1) if depth else st.sampled_from([True, False, {}, {"type": "null"}])
    size = st.one_of(st.integers(0, 4), integers)
    keywords: dict[str, Any_] = {
        "type": st.one_of(st.sampled_from(_TYPES), st.lists(st.sampled_from(_TYPES), max_size=3)),
        "properties": st.dictionaries(texts, inner, max_size=4),
        "patternProperties": st.dictionaries(patterns, inner, max_size=2),
        "additionalProperties": inner,
        "propertyNames": inner,
        "required": st.lists(texts, max_size=3),
        "items": inner,
        "prefixItems": st.lists(inner, max_size=3),
        "contains": inner,
        "enum": st.one_of(
            st.lists(values, max_size=5), st.just([f"choice {n}" for n in range(2000)])
        ),
        "const": values,
        "pattern": patterns,
        "format": st.one_of(st.sampled_from(["date", "uuid", "email", "uri", "ipv6"]), texts),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), size),
        **dict.fromkeys(("minProperties", "maxProperties"), size),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "multipleOf"), numbers),
        **dict.fromkeys(("anyOf", "oneOf", "allOf"), st.lists(inner, max_size=3)),
        **dict.fromkeys(("not", "if", "then", "else", "dependentSchemas"), inner),
        "$ref": st.sampled_from(_REFS),
        "$id": texts,
        "$defs": st.fixed_dictionaries({"a": inner, "b": inner}),
        "x-guidance": values,
    }
    chosen = draw(st.lists(st.sampled_from(sorted(keywords)), max_size=4, unique=True))
    return {
        name: draw(values if draw(st.integers(0, 30)) == 0 else keywords[name]) for name in chosen
    }


_PATTERNS = (
    *(r"(a+)+$", r"(a|a)*b", r"(a|aa)+$"),
    *(r"^(([a-z])+.)+[A-Z]([a-z])+$", r"(x+x+)+y", r".*.*.*=.*"),
    *(r"a{1000000}", r"(a{1,999}){1,999}"),
    *(r"((((a*)*)*)*)*", r"\d{4}", "", "^", "$", "^$", "(", "["),
    *(r"[^\x00-\U0010ffff]", r"\p{L}+"),
    *(r"(?=a)b", r"(?<!a)b", r"(a)\1", r"(?i)é", r"\u0000", r"[b-a]"),
)  # fmt: skip
patterns = st.one_of(
    st.sampled_from(_PATTERNS), st.text("ab0é(|)*+?{},[]^$.\\dDwWsSbp-:=!<", max_size=16)
)
grammars = st.one_of(
    st.sampled_from(
        [
            *("", "start:", "start: start", 'start: "a" start | "b"', 'start: ""', "start: /a*/"),
            *('start: "é" /(a+)+$/', "start: %json {}", "start: %json true", 'root ::= "a"'),
            *("start: a\na: b\nb: a", "start: /./ ~ 100000", 'start: ("a"*)*', "%import x", "\0"),
            *("start: " + "(" * 500 + '"a"' + ")" * 500, "start: <[1-9999999]>", "start: <</s>>"),
            'start: TEXT\nTEXT: /[^"]{1,9999}/',
        ]
    ),
    st.text('start:"ab|()*+?/\n%json{}~<>[]0', max_size=32).map("start: ".__add__),
)
outputs = st.one_of(
    st.fixed_dictionaries({"regex": patterns}),
    st.fixed_dictionaries({"grammar": grammars}),
    st.fixed_dictionaries({"choice": st.lists(texts, max_size=4)}),
    st.fixed_dictionaries({"json": st.one_of(schemas(), schemas().map(json.dumps), texts)}),
)
# Of fields, wherever they are: what the schema does not tell.
_KNOWN: dict[str, Any_] = {
    "structured_outputs": outputs,
    "chat_template_kwargs": template_kwargs,
    **dict.fromkeys(("schema", "parameters", "input_schema"), schemas()),
    "prompt": st.one_of(texts, st.lists(st.integers(0, 2050), max_size=90)),
    "tokens": st.lists(integers, max_size=9),
    "logit_bias": st.dictionaries(
        st.one_of(st.integers(-1, 2050).map(str), texts),
        st.one_of(st.sampled_from([-100, 100, -100.5, 0, 1e-320]), numbers),
        max_size=6,
    ),
    "arguments": st.one_of(texts, values.map(json.dumps)),
    "role": st.sampled_from(["user", "assistant", "tool", "system", "developer", "function", ""]),
    "include": st.lists(st.one_of(st.just("message.output_text.logprobs"), texts), max_size=3),
}


class _Fields:
    """Strategies for the values that a JSON schema of pydantic describes."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._definitions = schema.get("$defs", {})

    def value(self, schema: Mapping[str, Any], name: str = "", depth: int = 0) -> Any_:
        """The values of a field, at the edges of its range."""
        if name in _KNOWN:
            return _KNOWN[name]
        if "$ref" in schema:
            schema = self._definitions[schema["$ref"].rpartition("/")[2]]
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if options := schema.get("anyOf") or schema.get("oneOf"):
            return st.one_of([self.value(one, "", depth) for one in options])
        match schema.get("type"):
            case "object" if "properties" in schema and depth < 6:
                return self.object(schema, depth)
            case "array":
                most = min(schema.get("maxItems", 3), 3)
                return st.lists(self.value(schema["items"], "", depth + 1), max_size=most)
            case "integer" | "number" as kind:
                edges = [
                    edge + more
                    for key in ("minimum", "maximum", "exclusiveMinimum")
                    if (edge := schema.get(key)) is not None
                    for more in (-1, 0, 1)
                ]
                anything = integers if kind == "integer" else numbers
                if not edges:
                    return anything
                low, high = min(edges), max(edges)
                inside = st.integers(low, high) if kind == "integer" else st.floats(low, high)
                return st.one_of(anything, inside, st.sampled_from(edges))
            case "boolean":
                return st.booleans()
            case "null":
                return st.none()
            case "string" if "pattern" in schema:
                return st.one_of(st.sampled_from(["get_weather", "f", "a-b.c"]), texts)
            case "string":
                longest = schema.get("maxLength", 0)
                return st.one_of(texts, st.just("x" * longest), st.just("x" * (longest + 1)))
        return values

    def object(self, schema: Mapping[str, Any], depth: int = 0) -> Any_:
        """Objects with the required properties and some others."""
        needed = set(schema.get("required", ()))
        fields = {
            name: self.value(one, name, depth + 1) for name, one in schema["properties"].items()
        }
        return st.fixed_dictionaries(
            {name: one for name, one in fields.items() if name in needed},
            optional={name: one for name, one in fields.items() if name not in needed},
        )


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Json:
    """A body for the route: a small one that is served, with some fields at odd values."""
    schema = MODELS[path].model_json_schema()
    fields = _Fields(schema)
    names = sorted(schema["properties"].keys() - set(_SHORT))
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True))
    body = dict(SMALL[path])
    for name in chosen:
        strange = draw(st.integers(0, 15)) == 0
        body[name] = draw(values if strange else fields.value(schema["properties"][name], name))
    return body
