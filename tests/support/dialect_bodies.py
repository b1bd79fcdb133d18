"""Bodies of chats in each dialect that are served, with their options combined at random: tools,
formats, turns of tools, logprobs, stops. And what an answer says, whole or streamed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st
from support.odd_bodies import texts

Json = dict[str, Any]
Said = list[Any]

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["x", 'é"\\', "😀"]},
    },
    "required": ["a", "b"],
}
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
# Name, description and parameters.
_FUNCTIONS = (
    ("add", "Add two numbers", NUMBERS),
    ("lookup", "Look up a word", {"type": "object", "properties": {"key": {"maxLength": 12}}}),
    ("a-b", 'é 😀 "quoted"', SCHEMA),
)
_functions = st.lists(
    st.sampled_from(_FUNCTIONS), min_size=1, max_size=3, unique_by=lambda one: one[0]
)
_questions = st.sampled_from(["What is 3 plus 4?", "Hello.", "Add 12 and 30.", "Multiply 7 by 6."])
_words = texts.map(lambda text: text.replace("\0", " "))
_STOPS = (["."], ['"'], ["e", "{"], ["</tool_call>", "}"])


def _sampling(draw: st.DrawFn, warmest: float = 1.5) -> Json:
    return {
        "temperature": draw(st.sampled_from([0.0, 0.7, warmest])),
        "top_p": draw(st.sampled_from([0.5, 1.0])),
        "seed": draw(st.integers(0, 999)),
    }


def _some(draw: st.DrawFn, **options: st.SearchStrategy[Any]) -> Json:
    """Each option with even odds."""
    return {name: draw(one) for name, one in options.items() if draw(st.booleans())}


@st.composite
def chats(draw: st.DrawFn) -> Json:
    """A body of /v1/chat/completions."""
    messages: list[Json] = [{"role": "user", "content": draw(_questions)}]
    if draw(st.booleans()):
        role = draw(st.sampled_from(["system", "developer"]))
        messages.insert(0, {"role": role, "content": draw(st.sampled_from(["Be brief.", ""]))})
    if draw(st.booleans()):
        arguments = draw(st.sampled_from(['{"a":1,"b":2}', "", "no JSON", "[1]", '{"a":']))
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        said = draw(st.sampled_from([None, "", "Let me see."]))
        messages.append({"role": "assistant", "content": said, "tool_calls": [call]})
        answers = draw(st.sampled_from(["1", "2"]))
        messages.append({"role": "tool", "tool_call_id": answers, "content": draw(_words)})
    body: Json = {"messages": messages, "max_tokens": draw(st.integers(1, 60))} | _sampling(draw)
    if draw(st.booleans()):
        body["tools"] = [
            {"type": "function", "function": {"name": name, "description": says, "parameters": one}}
            for name, says, one in draw(_functions)
        ]
        named = {"type": "function", "function": {"name": body["tools"][0]["function"]["name"]}}
        body["tool_choice"] = draw(st.sampled_from(["auto", "none", "required", named]))
        body["parallel_tool_calls"] = draw(st.booleans())
    formats = [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}]
    if draw(st.booleans()):
        body |= {"logprobs": True, "top_logprobs": draw(st.sampled_from([0, 1, 20]))}
    return body | _some(
        draw,
        response_format=st.sampled_from([{"type": "text"}, *formats]),
        n=st.integers(1, 4),
        stop=st.sampled_from(_STOPS),
        return_token_ids=st.just(True),
        stream_options=st.just({"include_usage": True}),
    )


@st.composite
def responses(draw: st.DrawFn) -> Json:
    """A body of /v1/responses."""
    items: list[Json] = [{"role": "user", "content": draw(_questions)}]
    if draw(st.booleans()):
        output = draw(st.one_of(_words, st.just([{"type": "input_text", "text": "7"}])))
        items += [
            {"type": "reasoning", "id": "r", "summary": []},
            {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": "1", "output": output},
        ]
    body: Json = {"input": items, "max_output_tokens": draw(st.integers(1, 60))} | _sampling(draw)
    if draw(st.booleans()):
        body["tools"] = [
            {"type": "function", "name": name, "description": says, "parameters": one}
            for name, says, one in draw(_functions)
        ]
        named = {"type": "function", "name": body["tools"][0]["name"]}
        body["tool_choice"] = draw(st.sampled_from(["auto", "none", "required", named]))
        body["parallel_tool_calls"] = draw(st.booleans())
    if draw(st.booleans()):
        body["include"] = ["message.output_text.logprobs"]
        body["top_logprobs"] = draw(st.sampled_from([0, 3]))
    formats = [{"type": "json_object"}, {"type": "json_schema", "name": "s", "schema": SCHEMA}]
    return body | _some(
        draw,
        text=st.sampled_from([{"format": one} for one in formats]),
        instructions=st.just("Be brief."),
        reasoning=st.sampled_from([{"effort": "low", "summary": "auto"}, {"effort": "none"}]),
        metadata=st.just({"a": "b"}),
        store=st.booleans(),
    )


@st.composite
def messages(draw: st.DrawFn) -> Json:
    """A body of /v1/messages."""
    cached = [{"type": "text", "text": "Hi.", "cache_control": {"type": "ephemeral"}}]
    turns: list[Json] = [{"role": "user", "content": draw(st.one_of(_questions, st.just(cached)))}]
    if draw(st.booleans()):
        given = draw(st.sampled_from([{}, {"a": 1}, {"é": ["😀"]}]))
        thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
        call = {"type": "tool_use", "id": "t1", "name": "add", "input": given}
        content = draw(st.one_of(_words, st.just([{"type": "text", "text": "7"}]), st.none()))
        result = {
            "type": "tool_result",
            "tool_use_id": draw(st.sampled_from(["t1", "t9"])),
            "content": content,
            "is_error": draw(st.booleans()),
        }
        turns.append({"role": "assistant", "content": [thought, call]})
        turns.append({"role": "user", "content": [result, {"type": "text", "text": "Go on."}]})
    body: Json = {"messages": turns, "max_tokens": draw(st.integers(1, 60))} | _sampling(draw, 1.0)
    if draw(st.booleans()):
        body["tools"] = [
            {"name": name, "description": says, "input_schema": one}
            for name, says, one in draw(_functions)
        ]
        named = {"type": "tool", "name": body["tools"][0]["name"]}
        body["tool_choice"] = draw(
            st.sampled_from([{"type": "auto"}, {"type": "any"}, {"type": "none"}, named])
        )
    return body | _some(
        draw,
        stop_sequences=st.sampled_from(_STOPS),
        system=st.sampled_from(["Be brief.", cached]),
        thinking=st.sampled_from([{"type": "disabled"}, {"type": "enabled", "budget_tokens": 99}]),
        output_config=st.just({"format": {"type": "json_schema", "schema": SCHEMA}}),
    )


def chat_said(answer: Json) -> Said:
    """Of each choice: text, calls, end, tokens of the logprobs, token ids."""
    return [
        [
            choice["message"].get("content") or "",
            [
                [call["function"]["name"], call["function"]["arguments"]]
                for call in choice["message"].get("tool_calls") or ()
            ],
            choice["finish_reason"],
            [one["token"] for one in (choice["logprobs"] or {}).get("content") or ()],
            choice.get("token_ids") or [],
        ]
        for choice in answer["choices"]
    ]


def chat_streamed(events: Sequence[Json]) -> Said:
    """The same of a stream."""
    found: dict[int, list[Any]] = defaultdict(lambda: ["", [], None, [], []])
    for choice in (one for event in events for one in event["choices"]):
        said, delta = found[choice["index"]], choice["delta"]
        said[0] += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(said[1]):
                said[1].append([call["function"]["name"], ""])
            said[1][call["index"]][1] += call["function"].get("arguments") or ""
        said[2] = choice["finish_reason"] or said[2]
        said[3] += [one["token"] for one in (choice.get("logprobs") or {}).get("content") or ()]
        said[4] += choice.get("token_ids") or []
    return [found[index] for index in sorted(found)]


def response_said(answer: Json) -> Said:
    """Of each item: its kind and text, or name and arguments. And how the answer ended."""
    items = [
        [one["type"], one.get("name"), one.get("arguments"), _text_of(one), one.get("status")]
        for one in answer["output"]
    ]
    usage = [answer["usage"][f"{which}_tokens"] for which in ("input", "output")]
    return [items, answer["status"], answer["incomplete_details"], usage]


def _text_of(item: Json) -> str:
    return "".join(part["text"] for part in item.get("content") or ())


def response_streamed(events: Sequence[Json]) -> Said:
    """The same of a stream, whose deltas are those of its last event."""
    deltas: dict[int, str] = defaultdict(str)
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] += event["delta"]
    final: Json = events[-1]["response"]
    for place, item in enumerate(final["output"]):
        assert deltas[place] == (item.get("arguments") or _text_of(item)), item
    return response_said(final)


def message_said(answer: Json) -> Said:
    """Of each block: its kind and text, or name and input. And how the answer ended."""
    blocks = [
        [one["type"], one.get("text", one.get("thinking")), one.get("name"), one.get("input")]
        for one in answer["content"]
    ]
    usage = answer["usage"]
    tokens = [usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]]
    return [blocks, answer["stop_reason"], answer["stop_sequence"], tokens]


def message_streamed(events: Sequence[Json]) -> Said:
    """The same of a stream. The input of a call that was cut off is left out."""
    blocks: list[Json] = []
    answer: Json = {"content": blocks, "usage": {}}
    for event in events:
        match event["type"]:
            case "message_start":
                answer["usage"] |= event["message"]["usage"]
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                (kind,) = event["delta"].keys() - {"type"}
                blocks[-1][kind] = blocks[-1].get(kind, "") + event["delta"][kind]
            case "message_delta":
                answer |= event["delta"]
                answer["usage"] |= event["usage"]
    for block in blocks:
        if "partial_json" in block:
            block["input"] = _parsed(block.pop("partial_json"))
    return message_said(answer)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


# Of each dialect: bodies, what a whole answer says, and what a stream says.
DIALECTS: dict[
    str,
    tuple[st.SearchStrategy[Json], Callable[[Json], Said], Callable[[Sequence[Json]], Said]],
] = {
    "/v1/chat/completions": (chats(), chat_said, chat_streamed),
    "/v1/responses": (responses(), response_said, response_streamed),
    "/v1/messages": (messages(), message_said, message_streamed),
}
