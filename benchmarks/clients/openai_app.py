"""An application on `openai`: chats, tools, structured output, responses and completions."""

from __future__ import annotations

from typing import Any

import openai
from case_server import Server, serve_cases
from week import PLAN, SAVED, STORY, TOOL, Week, checked, closed, parsed, told

TOOLS: list[Any] = [openai.pydantic_function_tool(Week, name=TOOL)]
ASK: list[Any] = [{"role": "user", "content": PLAN}]
FUNCTION: Any = {
    "type": "function",
    "name": TOOL,
    "description": "Saves a week.",
    "parameters": closed(),
    "strict": True,
}
# Token ids of the answer, which show more than its text.
IDS = {"return_token_ids": True}


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.openai, api_key="none", max_retries=0)


def chat(server: Server) -> Any:
    found = client_of(server).chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": STORY}],
        temperature=0,
        extra_body=IDS,
    )
    (choice,) = found.choices
    assert choice.finish_reason == "stop"
    return told(choice.message.content), choice.token_ids


def chat_streamed(server: Server) -> Any:
    texts, ids, usage = [], [], None
    with client_of(server).chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": STORY}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=IDS,
    ) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts.append(choice.delta.content or "")
                ids += choice.token_ids
    assert usage is not None
    assert usage.completion_tokens == len(ids)
    assert len(texts) > 2, "the answer came at once"
    return told("".join(texts)), ids


def seeded(server: Server) -> Any:
    found = client_of(server).chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": STORY}],
        temperature=1,
        top_p=0.9,
        seed=7,
        n=2,
        logprobs=True,
        top_logprobs=2,
        extra_body=IDS,
    )
    assert all(choice.logprobs and choice.logprobs.content for choice in found.choices)
    return [(told(choice.message.content), choice.token_ids) for choice in found.choices]


def tool_loop(server: Server) -> Any:
    client, messages = client_of(server), list(ASK)
    first = client.chat.completions.create(
        model=server.model,
        messages=messages,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        extra_body=IDS,
    )
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.function.name == TOOL
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": SAVED}]
    last = client.chat.completions.create(
        model=server.model, messages=messages, tools=TOOLS, tool_choice="none", temperature=0
    )
    return checked(call.function.arguments), choice.token_ids, told(last.choices[0].message.content)


def tool_loop_streamed(server: Server) -> Any:
    client, messages = client_of(server), list(ASK)
    with client.chat.completions.stream(
        model=server.model,
        messages=messages,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": TOOL}},
        temperature=0,
    ) as stream:
        deltas = [
            event.arguments_delta
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Week)
    assert "".join(deltas) == call.function.arguments
    asked = message.model_dump(exclude_none=True, exclude={"parsed"})
    messages += [asked, {"role": "tool", "tool_call_id": call.id, "content": SAVED}]
    with client.chat.completions.stream(
        model=server.model, messages=messages, tools=TOOLS, tool_choice="none", temperature=0
    ) as stream:
        last = stream.get_final_completion().choices[0].message
    return checked(call.function.arguments), told(last.content)


def tools_auto(server: Server) -> Any:
    found = client_of(server).chat.completions.create(
        model=server.model, messages=ASK, tools=TOOLS, temperature=0, extra_body=IDS
    )
    (choice,) = found.choices
    calls = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls or ()]
    assert choice.message.content or calls
    return choice.message.content, calls, choice.token_ids


def tools_auto_streamed(server: Server) -> Any:
    with client_of(server).chat.completions.stream(
        model=server.model, messages=ASK, tools=TOOLS, temperature=0
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    calls = [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]
    assert message.content or calls
    return message.content, calls


def parse(server: Server) -> Any:
    found = client_of(server).chat.completions.parse(
        model=server.model, messages=ASK, response_format=Week, temperature=0
    )
    return parsed(found.choices[0].message.parsed)


def parse_streamed(server: Server) -> Any:
    with client_of(server).chat.completions.stream(
        model=server.model, messages=ASK, response_format=Week, temperature=0
    ) as stream:
        events = [event.type for event in stream]
        found = stream.get_final_completion()
    assert events.count("content.delta") > 2
    return parsed(found.choices[0].message.parsed)


def parse_with_tools(server: Server) -> Any:
    """An agent that may call a tool, and whose last answer follows a schema."""
    found = client_of(server).chat.completions.parse(
        model=server.model,
        messages=ASK,
        response_format=Week,
        tools=TOOLS,
        parallel_tool_calls=False,
        temperature=0,
    )
    return _call_or_week(found.choices[0].message)


def parse_with_tools_streamed(server: Server) -> Any:
    with client_of(server).chat.completions.stream(
        model=server.model,
        messages=ASK,
        response_format=Week,
        tools=TOOLS,
        parallel_tool_calls=False,
        temperature=0,
    ) as stream:
        found = stream.get_final_completion()
    return _call_or_week(found.choices[0].message)


def _call_or_week(message: Any) -> str:
    if message.tool_calls:
        (call,) = message.tool_calls
        return checked(call.function.arguments)
    return parsed(message.parsed)


def responses(server: Server) -> Any:
    client = client_of(server)
    items: list[Any] = list(ASK)
    first = client.responses.create(
        model=server.model,
        input=items,
        tools=[FUNCTION],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        store=False,
    )
    (call,) = first.output
    items += [
        *first.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": SAVED},
    ]
    last = client.responses.create(
        model=server.model, input=items, tools=[FUNCTION], tool_choice="none", temperature=0
    )
    return checked(call.arguments), told(last.output_text)


def responses_tools_streamed(server: Server) -> Any:
    with client_of(server).responses.stream(
        model=server.model,
        input=ASK,
        tools=[FUNCTION],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    ) as stream:
        kind = "response.function_call_arguments.delta"
        deltas = [one.delta for one in stream if one.type == kind]
        (call,) = stream.get_final_response().output
    assert "".join(deltas) == call.arguments
    return checked(call.arguments)


def responses_streamed(server: Server) -> Any:
    with client_of(server).responses.stream(
        model=server.model, input=STORY, instructions="Be kind.", temperature=0
    ) as stream:
        deltas = [one.delta for one in stream if one.type == "response.output_text.delta"]
        text = stream.get_final_response().output_text
    assert "".join(deltas) == text
    return told(text)


def responses_parse(server: Server) -> Any:
    found = client_of(server).responses.parse(
        model=server.model, input=PLAN, text_format=Week, temperature=0
    )
    return parsed(found.output_parsed)


def responses_parse_streamed(server: Server) -> Any:
    with client_of(server).responses.stream(
        model=server.model, input=PLAN, text_format=Week, temperature=0
    ) as stream:
        deltas = [one.delta for one in stream if one.type == "response.output_text.delta"]
        found = stream.get_final_response()
    assert len(deltas) > 2
    return parsed(found.output_parsed)


def completions(server: Server) -> Any:
    found = client_of(server).completions.create(
        model=server.model,
        prompt="Once upon a time",
        max_tokens=200,
        temperature=0,
        extra_body=IDS,
    )
    return told(found.choices[0].text), found.choices[0].token_ids


def completions_streamed(server: Server) -> Any:
    texts = []
    for chunk in client_of(server).completions.create(
        model=server.model, prompt="Once upon a time", max_tokens=200, temperature=0, stream=True
    ):
        texts += [choice.text for choice in chunk.choices]
    return told("".join(texts))


def refusals(server: Server) -> Any:
    """What a cluster without such models does not have is a plain 404, without a retry."""
    client = client_of(server)
    told = []
    for ask in (
        lambda: client.embeddings.create(model=server.model, input="a"),
        lambda: client.moderations.create(input="a"),
        lambda: client.images.generate(prompt="a"),
        lambda: client.models.retrieve("absent"),
        lambda: client.chat.completions.create(model="absent", messages=ASK),
    ):
        try:
            ask()
        except openai.NotFoundError as error:
            told.append(error.message)
    assert len(told) == 5, told
    return told


def models(server: Server) -> Any:
    client = client_of(server)
    names = [one.id for one in client.models.list()]
    assert server.model in names
    assert client.models.retrieve(server.model).id == server.model
    return names


if __name__ == "__main__":
    serve_cases(
        {
            "chat": chat,
            "chat, streamed": chat_streamed,
            "seed, n, logprobs": seeded,
            "tool loop": tool_loop,
            "tool loop, streamed": tool_loop_streamed,
            "tools, auto": tools_auto,
            "tools, auto, streamed": tools_auto_streamed,
            "parse": parse,
            "parse, streamed": parse_streamed,
            "parse with tools": parse_with_tools,
            "parse with tools, streamed": parse_with_tools_streamed,
            "responses, tool loop": responses,
            "responses, tools, streamed": responses_tools_streamed,
            "responses, streamed": responses_streamed,
            "responses.parse": responses_parse,
            "responses.parse, streamed": responses_parse_streamed,
            "completions": completions,
            "completions, streamed": completions_streamed,
            "refusals": refusals,
            "models": models,
        }
    )
