"""An application on LlamaIndex, whose OpenAILike is for servers of OpenAI's API."""

from __future__ import annotations

from typing import Any

from case_server import Server, serve_cases, wait
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from week import PLAN, SAVED, STORY, TOOL, TOOL_SAYS, Week, parsed, told


def model_of(server: Server, **more: Any) -> OpenAILike:
    return OpenAILike(
        model=server.model,
        api_base=server.openai,
        api_key="none",
        temperature=0,
        max_retries=0,
        context_window=4096,
        is_function_calling_model=True,
        **({"is_chat_model": True, "max_tokens": 2000} | more),
    )


def save_week(**days: Any) -> str:
    return SAVED


TOOLS = [
    FunctionTool.from_defaults(save_week, name=TOOL, description=TOOL_SAYS, fn_schema=Week),
]


def chat(server: Server) -> Any:
    return told(model_of(server).chat([ChatMessage(role="user", content=STORY)]).message.content)


def chat_streamed(server: Server) -> Any:
    found = list(model_of(server).stream_chat([ChatMessage(role="user", content=STORY)]))
    assert len(found) > 2
    return told(found[-1].message.content)


def achat_streamed(server: Server) -> Any:
    async def pieces() -> list[str]:
        messages = [ChatMessage(role="user", content=STORY)]
        return [one.delta or "" async for one in await model_of(server).astream_chat(messages)]

    return told("".join(wait(pieces())))


def complete(server: Server) -> Any:
    model = model_of(server, is_chat_model=False, max_tokens=200)
    return told(model.complete("Once upon a time").text)


def tool_loop(server: Server) -> Any:
    model, asked = model_of(server), ChatMessage(role="user", content=PLAN)
    first = model.chat_with_tools(
        TOOLS, chat_history=[asked], tool_required=True, allow_parallel_tool_calls=False
    )
    (call,) = model.get_tool_calls_from_response(first)
    result = ChatMessage(
        role="tool", content=SAVED, additional_kwargs={"tool_call_id": call.tool_id}
    )
    last = model.chat([asked, first.message, result])
    return parsed(call.tool_kwargs), told(last.message.content)


def complete_streamed(server: Server) -> Any:
    model = model_of(server, is_chat_model=False, max_tokens=200)
    found = list(model.stream_complete("Once upon a time"))
    assert len(found) > 2
    return told(found[-1].text)


def tools_streamed(server: Server) -> Any:
    model = model_of(server)
    *_, last = model.stream_chat_with_tools(
        TOOLS,
        chat_history=[ChatMessage(role="user", content=PLAN)],
        tool_required=True,
        allow_parallel_tool_calls=False,
    )
    (call,) = model.get_tool_calls_from_response(last)
    return parsed(call.tool_kwargs)


def structured_streamed(server: Server) -> Any:
    """Without a schema the library lets the model choose, and the demo model would not call."""
    asked = [ChatMessage(role="user", content=PLAN)]
    model = model_of(server, should_use_structured_outputs=True)
    *_, last = model.as_structured_llm(Week).stream_chat(asked)
    return parsed(last.raw)


def structured(server: Server, **more: Any) -> Any:
    return parsed(model_of(server, **more).as_structured_llm(Week).complete(PLAN).raw)


if __name__ == "__main__":
    serve_cases(
        {
            "chat": chat,
            "stream_chat": chat_streamed,
            "astream_chat": achat_streamed,
            "complete": complete,
            "stream_complete": complete_streamed,
            "chat_with_tools loop": tool_loop,
            "stream_chat_with_tools": tools_streamed,
            "as_structured_llm": structured,
            "as_structured_llm, json_schema": lambda server: structured(
                server, should_use_structured_outputs=True
            ),
            "as_structured_llm, json_schema, streamed": structured_streamed,
        }
    )
