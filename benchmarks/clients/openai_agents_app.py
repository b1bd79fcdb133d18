"""An application on the OpenAI Agents SDK, through /v1/responses and /v1/chat/completions."""

from __future__ import annotations

from functools import partial
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolCallItem,
    function_tool,
    set_tracing_disabled,
)
from case_server import Server, serve_cases, wait
from week import PLAN, SAVED, STORY, Day, Week, parsed, told

set_tracing_disabled(True)
Model = type[OpenAIResponsesModel] | type[OpenAIChatCompletionsModel]


def agent_of(server: Server, model: Model, **more: Any) -> Agent[Any]:
    client = openai.AsyncOpenAI(base_url=server.openai, api_key="none", max_retries=0)
    settings = ModelSettings(temperature=0, **more.pop("settings", {}))
    return Agent(
        name="helper",
        instructions="Be kind.",
        model=model(model=server.model, openai_client=client),
        model_settings=settings,
        **more,
    )


def run(server: Server, model: Model) -> Any:
    return told(wait(Runner.run(agent_of(server, model), STORY)).final_output)


def streamed(server: Server, model: Model) -> Any:
    return told(finished(agent_of(server, model), STORY, True).final_output)


def finished(agent: Agent[Any], ask: str, streams: bool) -> Any:
    """The result of an agent, read as a stream or at once."""

    async def run() -> Any:
        if not streams:
            return await Runner.run(agent, ask, max_turns=4)
        result = Runner.run_streamed(agent, ask, max_turns=4)
        kinds = [event.type async for event in result.stream_events()]
        assert kinds.count("raw_response_event") > 4
        return result

    return wait(run())


def tool_loop(server: Server, model: Model, streams: bool = False) -> Any:
    """The first turn has to call the tool; the SDK lets the model choose after that."""
    saved: list[Day] = []

    @function_tool
    def save_two_days(first: Day, second: Day) -> str:
        """Saves the plans of two days."""
        saved.extend([first, second])
        return SAVED

    settings = {"tool_choice": "required", "parallel_tool_calls": False}
    agent = agent_of(server, model, tools=[save_two_days], settings=settings)
    result = finished(agent, PLAN, streams)
    assert sum(isinstance(one, ToolCallItem) for one in result.new_items) == 1
    return [one.model_dump() for one in saved], told(result.final_output)


def output_type(server: Server, model: Model, streams: bool = False) -> Any:
    agent = agent_of(server, model, output_type=Week)
    return parsed(finished(agent, PLAN, streams).final_output)


def output_type_with_tools(server: Server, model: Model, streams: bool = False) -> Any:
    """An agent that may call a tool once, and whose last answer follows a schema."""
    noted: list[Day] = []

    @function_tool(is_enabled=lambda context, agent: not noted)
    def note(day: Day) -> str:
        """Notes a day."""
        noted.append(day)
        return SAVED

    settings = {"parallel_tool_calls": False}
    agent = agent_of(server, model, output_type=Week, tools=[note], settings=settings)
    found = parsed(finished(agent, PLAN, streams).final_output)
    return [one.model_dump() for one in noted], found


CASES = {
    "run": run,
    "run_streamed": streamed,
    "tool loop": tool_loop,
    "tool loop, streamed": partial(tool_loop, streams=True),
    "output_type": output_type,
    "output_type, streamed": partial(output_type, streams=True),
    "output_type with tools": output_type_with_tools,
    "output_type with tools, streamed": partial(output_type_with_tools, streams=True),
}
MODELS: dict[str, Model] = {
    "responses": OpenAIResponsesModel,
    "chat": OpenAIChatCompletionsModel,
}

if __name__ == "__main__":
    serve_cases(
        {
            f"{api}, {name}": lambda server, case=case, model=model: case(server, model)
            for api, model in MODELS.items()
            for name, case in CASES.items()
        }
    )
