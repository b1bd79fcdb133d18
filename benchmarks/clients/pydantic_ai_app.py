"""An application on pydantic-ai: agents with tools and with outputs of each kind."""

from __future__ import annotations

from typing import Any

from case_server import Server, serve_cases, wait
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ModelMessage, ToolCallPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from week import PLAN, SAVED, STORY, Day, Week, parsed, told

GREEDY: Any = {"temperature": 0, "parallel_tool_calls": False}


def chat_of(server: Server) -> Any:
    provider = OpenAIProvider(base_url=server.openai, api_key="none")
    return OpenAIChatModel(server.model, provider=provider)


def responses_of(server: Server) -> Any:
    provider = OpenAIProvider(base_url=server.openai, api_key="none")
    return OpenAIResponsesModel(server.model, provider=provider)


def anthropic_of(server: Server) -> Any:
    provider = AnthropicProvider(base_url=server.url, api_key="none")
    return AnthropicModel(server.model, provider=provider)


def calls_of(messages: list[ModelMessage]) -> int:
    return sum(isinstance(part, ToolCallPart) for one in messages for part in one.parts)


def run(server: Server, model: Any = chat_of) -> Any:
    agent = Agent(model(server), system_prompt="Be kind.", model_settings=GREEDY)
    return told(agent.run_sync(STORY).output)


def stream(server: Server, model: Any = chat_of) -> Any:
    async def pieces() -> list[str]:
        agent = Agent(model(server), model_settings=GREEDY)
        async with agent.run_stream(STORY) as result:
            return [one async for one in result.stream_text(delta=True, debounce_by=None)]

    found = wait(pieces())
    assert len(found) > 2
    return told("".join(found))


def tool_output(server: Server, model: Any = chat_of) -> Any:
    agent = Agent(model(server), output_type=ToolOutput(Week), retries=0, model_settings=GREEDY)
    result = agent.run_sync(PLAN)
    assert calls_of(result.all_messages()) == 1
    return parsed(result.output)


def output_streamed(server: Server, kind: Any, model: Any = chat_of) -> Any:
    async def last() -> Week:
        agent = Agent(model(server), output_type=kind(Week), retries=0, model_settings=GREEDY)
        async with agent.run_stream(PLAN) as result:
            return [one async for one in result.stream_output()][-1]

    return parsed(wait(last()))


def native_output(server: Server, model: Any = chat_of) -> Any:
    agent = Agent(model(server), output_type=NativeOutput(Week), retries=0, model_settings=GREEDY)
    return parsed(agent.run_sync(PLAN).output)


def native_output_with_tools(server: Server, model: Any = chat_of) -> Any:
    """An agent that may call a tool once, and whose last answer follows a schema."""
    agent = Agent(model(server), output_type=NativeOutput(Week), retries=0, model_settings=GREEDY)
    noted: list[Day] = []

    async def unless_noted(context: Any, tool: Any) -> Any:
        return None if noted else tool

    @agent.tool_plain(prepare=unless_noted)
    def note(day: Day) -> str:
        """Notes a day."""
        noted.append(day)
        return SAVED

    found = parsed(agent.run_sync(PLAN).output)
    return [one.model_dump() for one in noted], found


if __name__ == "__main__":
    serve_cases(
        {
            "run": run,
            "run_stream": stream,
            "ToolOutput": tool_output,
            "ToolOutput, streamed": lambda server: output_streamed(server, ToolOutput),
            "NativeOutput": native_output,
            "NativeOutput, streamed": lambda server: output_streamed(server, NativeOutput),
            "NativeOutput with tools": native_output_with_tools,
            "responses": lambda server: run(server, responses_of),
            "responses, streamed": lambda server: stream(server, responses_of),
            "responses, ToolOutput": lambda server: tool_output(server, responses_of),
            "responses, ToolOutput, streamed": lambda server: output_streamed(
                server, ToolOutput, responses_of
            ),
            "anthropic": lambda server: run(server, anthropic_of),
            "anthropic, streamed": lambda server: stream(server, anthropic_of),
            "anthropic, ToolOutput": lambda server: tool_output(server, anthropic_of),
            "anthropic, ToolOutput, streamed": lambda server: output_streamed(
                server, ToolOutput, anthropic_of
            ),
        }
    )
