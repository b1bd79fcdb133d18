"""An application on the OpenAI Agents SDK, through /v1/responses and /v1/chat/completions."""

from __future__ import annotations

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
    async def text() -> str:
        result = Runner.run_streamed(agent_of(server, model), STORY)
        kinds = [event.type async for event in result.stream_events()]
        assert kinds.count("raw_response_event") > 4
        return str(result.final_output)

    return told(wait(text()))


def tool_loop(server: Server, model: Model) -> Any:
    """The first turn has to call the tool; the SDK lets the model choose after that."""
    saved: list[Day] = []

    @function_tool
    def save_two_days(first: Day, second: Day) -> str:
        """Saves the plans of two days."""
        saved.extend([first, second])
        return SAVED

    settings = {"tool_choice": "required", "parallel_tool_calls": False}
    agent = agent_of(server, model, tools=[save_two_days], settings=settings)
    result = wait(Runner.run(agent, PLAN, max_turns=4))
    assert sum(isinstance(one, ToolCallItem) for one in result.new_items) == 1
    return [one.model_dump() for one in saved], told(result.final_output)


def output_type(server: Server, model: Model) -> Any:
    agent = agent_of(server, model, output_type=Week)
    return parsed(wait(Runner.run(agent, PLAN)).final_output)


def output_type_with_tools(server: Server, model: Model) -> Any:
    """An agent that may call a tool once, and whose last answer follows a schema."""
    noted: list[Day] = []

    @function_tool(is_enabled=lambda context, agent: not noted)
    def note(day: Day) -> str:
        """Notes a day."""
        noted.append(day)
        return SAVED

    settings = {"parallel_tool_calls": False}
    agent = agent_of(server, model, output_type=Week, tools=[note], settings=settings)
    found = parsed(wait(Runner.run(agent, PLAN, max_turns=4)).final_output)
    return [one.model_dump() for one in noted], found


CASES = {
    "run": run,
    "run_streamed": streamed,
    "tool loop": tool_loop,
    "output_type": output_type,
    "output_type with tools": output_type_with_tools,
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
