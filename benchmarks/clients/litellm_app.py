"""An application on LiteLLM, through its OpenAI and Anthropic providers."""

from __future__ import annotations

from typing import Any

import litellm
from case_server import Server, serve_cases, wait
from week import PLAN, SAVED, STORY, TOOL, TOOL_SAYS, Week, checked, closed, told

litellm.telemetry = False
ASK: list[Any] = [{"role": "user", "content": PLAN}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": TOOL, "description": TOOL_SAYS, "parameters": closed()},
    }
]


def openai_of(server: Server) -> dict[str, Any]:
    return {
        "model": f"openai/{server.model}",
        "api_base": server.openai,
        "api_key": "none",
        "temperature": 0,
        "num_retries": 0,
    }


def anthropic_of(server: Server) -> dict[str, Any]:
    return {
        "model": f"anthropic/{server.model}",
        "api_base": server.url,
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 2000,
        "num_retries": 0,
    }


def chat(server: Server, options: Any = openai_of) -> Any:
    found = litellm.completion(
        messages=[{"role": "user", "content": STORY}], user="someone", **options(server)
    )
    return told(found.choices[0].message.content), found.usage.completion_tokens


def chat_streamed(server: Server, options: Any = openai_of) -> Any:
    chunks = list(
        litellm.completion(
            messages=[{"role": "user", "content": STORY}],
            stream=True,
            stream_options={"include_usage": True},
            **options(server),
        )
    )
    built = litellm.stream_chunk_builder(chunks)
    assert len(chunks) > 2
    return told(built.choices[0].message.content)


def achat(server: Server) -> Any:
    async def run() -> str:
        found = await litellm.acompletion(
            messages=[{"role": "user", "content": STORY}], **openai_of(server)
        )
        return found.choices[0].message.content

    return told(wait(run()))


def tool_loop(server: Server, options: Any = openai_of) -> Any:
    messages = list(ASK)
    first = litellm.completion(
        messages=messages,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        **options(server),
    )
    message = first.choices[0].message
    (call,) = message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": SAVED}]
    last = litellm.completion(messages=messages, tools=TOOLS, tool_choice="none", **options(server))
    return checked(call.function.arguments), told(last.choices[0].message.content)


def tools_streamed(server: Server, options: Any = openai_of) -> Any:
    chunks = list(
        litellm.completion(
            messages=ASK,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": TOOL}},
            stream=True,
            **options(server),
        )
    )
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    return checked(call.function.arguments)


def schema(server: Server, options: Any = openai_of) -> Any:
    found = litellm.completion(messages=ASK, response_format=Week, **options(server))
    return checked(found.choices[0].message.content)


def schema_streamed(server: Server, options: Any = openai_of) -> Any:
    chunks = list(
        litellm.completion(messages=ASK, response_format=Week, stream=True, **options(server))
    )
    assert len(chunks) > 2
    return checked(litellm.stream_chunk_builder(chunks).choices[0].message.content)


def responses_streamed(server: Server) -> Any:
    deltas = [
        one.delta
        for one in litellm.responses(input=STORY, stream=True, **openai_of(server))
        if one.type == "response.output_text.delta"
    ]
    assert len(deltas) > 2
    return told("".join(deltas))


def text_streamed(server: Server) -> Any:
    options = openai_of(server) | {"model": f"text-completion-openai/{server.model}"}
    pieces = [
        one.choices[0].text or ""
        for one in litellm.text_completion(
            prompt="Once upon a time", max_tokens=200, stream=True, **options
        )
    ]
    assert len(pieces) > 2
    return told("".join(pieces))


def responses(server: Server) -> Any:
    found = litellm.responses(input=STORY, **openai_of(server))
    return told(found.output[0].content[0].text)


def text(server: Server) -> Any:
    options = openai_of(server) | {"model": f"text-completion-openai/{server.model}"}
    found = litellm.text_completion(prompt="Once upon a time", max_tokens=200, **options)
    return told(found.choices[0].text)


if __name__ == "__main__":
    serve_cases(
        {
            "completion": chat,
            "completion, streamed": chat_streamed,
            "acompletion": achat,
            "tool loop": tool_loop,
            "tools, streamed": tools_streamed,
            "response_format": schema,
            "response_format, streamed": schema_streamed,
            "responses": responses,
            "responses, streamed": responses_streamed,
            "text_completion": text,
            "text_completion, streamed": text_streamed,
            "anthropic/": lambda server: chat(server, anthropic_of),
            "anthropic/, streamed": lambda server: chat_streamed(server, anthropic_of),
            "anthropic/, tool loop": lambda server: tool_loop(server, anthropic_of),
            "anthropic/, tools, streamed": lambda server: tools_streamed(server, anthropic_of),
            "anthropic/, response_format": lambda server: schema(server, anthropic_of),
            "anthropic/, response_format, streamed": lambda server: schema_streamed(
                server, anthropic_of
            ),
        }
    )
