"""Every dialect tells the same message as a stream and as a whole, wherever the answer is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.types.requests import Usage
from kvrelay.wire.inference import GenerateResponse
from router.api.http.chat.answer import ChatAnswer
from router.api.http.dialects.anthropic.requests import parse_messages
from router.api.http.dialects.anthropic.shape import MessagesShape
from router.api.http.dialects.dialect import AnswerShape, Head, Opened
from router.api.http.dialects.openai.requests import parse_chat
from router.api.http.dialects.openai.shape import OpenAiShape
from router.api.http.dialects.responses.requests import parse_response
from router.api.http.dialects.responses.shape import ResponseShape
from router.frontend.answer_parsers.formats import TOOL_FORMATS
from router.frontend.answer_parsers.reasoning import ReasoningSplitter

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
WEATHER = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "B\\u00e4rn \u2028"}}\n</tool_call>'
)
TEXTS = (
    "",
    "It rains. \N{GRINNING FACE}",
    f"<think>Rain?\n</think>\n\nLet me look.{WEATHER}\n{WEATHER} And then.",
    f"<think>Rain?</think>{WEATHER}",
    f"A <b> {WEATHER}between{WEATHER}",
    '<think>a</think><tool_call>{"name": "weather", "arguments": {"a": [1, ',
    "<think>only",
    "<tool_call>no JSON</tool_call>",
)
Message = tuple[str, str, list[tuple[str, Any]]]


def opened(parse: Callable[[dict[str, Any]], Any], body: dict[str, Any]) -> Opened:
    completion = parse(body)
    parser = ReasoningSplitter(TOOL_FORMATS["hermes"].open(()))
    stream = SimpleNamespace(
        usage=lambda: Usage(7, 3, 0), stop_string=None, request=completion.requests[0]
    )
    choices: Any = SimpleNamespace(completion=completion, streams=[stream])
    return Opened(choices, Head("resp_1", 0, "demo"), (), [ChatAnswer("a", parser)])


def responses(pieces: Sequence[str]) -> list[GenerateResponse]:
    last = len(pieces) - 1
    return [
        GenerateResponse(
            request_id="a",
            index=number,
            token_ids=(number,),
            text=piece,
            finish_reason="stop" if number == last else None,
            usage=Usage(7, 3, len(pieces)) if number == last else None,
        )
        for number, piece in enumerate(pieces)
    ]


def whole(shape: AnswerShape, pieces: Sequence[str]) -> dict[str, Any]:
    told = responses(pieces)
    for one in told:
        shape.hear(0, one)
    steps = shape.whole([told[-1]], [None])
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: dict[str, Any] = json.loads(b"".join(end.value))
            return found


def streamed(shape: AnswerShape, pieces: Sequence[str]) -> list[dict[str, Any]]:
    told = responses(pieces)
    text = shape.begin() + "".join(shape.chunk(0, one, None) for one in told) + shape.end()
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert text.isascii()
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat_whole(body: dict[str, Any]) -> Message:
    (choice,) = body["choices"]
    message = choice["message"]
    calls = [
        (one["function"]["name"], one["function"]["arguments"])
        for one in message.get("tool_calls", ())
    ]
    return message["content"] or "", message.get("reasoning_content", ""), calls


def chat_stream(events: list[dict[str, Any]]) -> Message:
    texts, calls = {"content": "", "reasoning_content": ""}, []
    for one in events:
        delta, reason = one["choices"][0]["delta"], one["choices"][0]["finish_reason"]
        assert delta or reason, "no event is empty"
        for name in texts:
            texts[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return texts["content"], texts["reasoning_content"], [(one[0], one[1]) for one in calls]


def blocks_stream(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content blocks of Anthropic's events, whose order it checks."""
    assert [one["type"] for one in events[:2]] == ["message_start", "ping"]
    assert [one["type"] for one in events[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    growing = False
    for one in events[2:-2]:
        kind = one["type"]
        if kind == "content_block_start":
            assert not growing
            assert one["index"] == len(blocks)
            growing = True
            blocks.append(one["content_block"])
            texts = []
            continue
        assert growing
        assert one["index"] == len(blocks) - 1
        if kind == "content_block_stop":
            growing = False
            if blocks[-1]["type"] == "tool_use" and texts:
                try:
                    blocks[-1]["input"] = json.loads("".join(texts))
                except ValueError:
                    blocks[-1]["input"] = None
            continue
        delta = one["delta"]
        match delta.pop("type"):
            case "text_delta":
                blocks[-1]["text"] += delta["text"]
            case "thinking_delta":
                blocks[-1]["thinking"] += delta["thinking"]
            case "signature_delta":
                blocks[-1]["signature"] = delta["signature"]
            case "input_json_delta":
                texts.append(delta["partial_json"])
    assert not growing
    return blocks


def check(pieces: Sequence[str]) -> None:
    uncut = ["".join(pieces)]
    assert (
        chat_stream(streamed(OpenAiShape(opened(parse_chat, CHAT)), pieces))
        == chat_whole(whole(OpenAiShape(opened(parse_chat, CHAT)), pieces))
        == chat_whole(whole(OpenAiShape(opened(parse_chat, CHAT)), uncut))
    )
    message = whole(MessagesShape(opened(parse_messages, CHAT)), pieces)
    content = message["content"]
    assert content == whole(MessagesShape(opened(parse_messages, CHAT)), uncut)["content"]
    events = streamed(MessagesShape(opened(parse_messages, CHAT)), pieces)
    blocks = blocks_stream(events)
    for block, one in zip(blocks, content, strict=True):
        # Clients read what is complete of arguments that were cut off.
        assert block == one or block["input"] is None
    assert events[-2]["delta"]["stop_reason"] == message["stop_reason"]
    assert events[-2]["usage"] == message["usage"]
    body = {"input": "x"}
    response = whole(ResponseShape(opened(parse_response, body)), pieces)
    assert response["output"] == whole(ResponseShape(opened(parse_response, body)), uncut)["output"]
    told = streamed(ResponseShape(opened(parse_response, body)), pieces)
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    last = told[-1]["response"]
    assert (last["output"], last["usage"]) == (response["output"], response["usage"])
    check_items(told, last["output"])


def check_items(events: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """The items of the events are those of the output, each told from its begin to its end."""
    assert [one["type"] for one in events[:2]] == ["response.created", "response.in_progress"]
    texts = [""] * len(output)
    for one in events[2:-1]:
        assert "item" in one or one["item_id"] == output[one["output_index"]]["id"]
        if one["type"].endswith(".delta"):
            texts[one["output_index"]] += one["delta"]
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert done == output
    for text, item in zip(texts, output, strict=True):
        told = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert text == told


@pytest.mark.parametrize("text", TEXTS)
def test_a_message_does_not_depend_on_where_it_is_cut(text: str) -> None:
    for cut in range(len(text) + 1):
        check([text[:cut], text[cut:]])


@given(st.data())
def test_a_message_does_not_depend_on_how_often_it_is_cut(data: st.DataObject) -> None:
    text = "".join(
        data.draw(st.lists(st.sampled_from([*TEXTS, "<", "</think>", " \n"]), max_size=4))
    )
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    check([text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)])


def test_tokens_of_reasoning_are_those_of_the_responses_that_tell_it() -> None:
    answer = ChatAnswer("a", ReasoningSplitter())
    for one in responses(["<think>", "Rain", "?", "</think>", "\n\nIt ", "rains"]):
        answer.hear(one)
    assert answer.reasoning_tokens == 3


@pytest.mark.parametrize("most", [2**31 - 1, 2**31, 2**53 - 1, 10**30])
def test_a_longer_answer_than_any_context_may_be_asked_for(most: int) -> None:
    """These dialects cut it to the context."""
    turn = {"model": "demo", "messages": [{"role": "user", "content": "a"}], "max_tokens": most}
    asked = {"model": "demo", "input": "a", "max_output_tokens": most}
    for completion in (parse_messages(turn), parse_response(asked)):
        assert completion.requests[0].sampling.max_tokens == 2**31 - 1
