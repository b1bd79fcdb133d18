"""An application on LangChain: `langchain-openai`, `langchain-anthropic` and agents."""

from __future__ import annotations

import json
from typing import Any

from case_server import Server, serve_cases, wait
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI, OpenAI
from week import PLAN, SAVED, STORY, TOOL, TOOL_SAYS, Week, parsed, told


def save_week(**days: Any) -> str:
    return SAVED


SAVE = StructuredTool.from_function(save_week, name=TOOL, description=TOOL_SAYS, args_schema=Week)


def openai_of(server: Server, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=server.openai,
        api_key="none",
        model=server.model,
        temperature=0,
        max_retries=0,
        **more,
    )


def anthropic_of(server: Server) -> ChatAnthropic:
    return ChatAnthropic(
        base_url=server.url,
        api_key="none",
        model=server.model,
        temperature=0,
        max_tokens=2000,
        max_retries=0,
    )


def _loop(model: Any, choice: Any, last: Any, **more: Any) -> Any:
    """An agent's loop by hand: a call, its result, an answer."""
    messages: list[Any] = [HumanMessage(PLAN)]
    said = model.bind_tools([SAVE], tool_choice=choice, **more).invoke(messages)
    (call,) = said.tool_calls
    assert not said.invalid_tool_calls
    result = SAVE.invoke(call)
    assert isinstance(result, ToolMessage)
    end = model.bind_tools([SAVE], tool_choice=last).invoke([*messages, said, result])
    return parsed(call["args"]), told(end.text)


def invoke(server: Server) -> Any:
    found = openai_of(server, seed=3).invoke(STORY)
    assert found.usage_metadata is not None
    return told(found.text), found.usage_metadata["output_tokens"]


def stream(server: Server) -> Any:
    pieces = [one.text for one in openai_of(server, stream_usage=True).stream(STORY)]
    assert len(pieces) > 2
    return told("".join(pieces))


def astream(server: Server) -> Any:
    async def pieces() -> list[str]:
        return [one.text async for one in openai_of(server).astream(STORY)]

    return told("".join(wait(pieces())))


def bind_tools(server: Server) -> Any:
    return _loop(openai_of(server), TOOL, "none", parallel_tool_calls=False)


def bind_tools_streamed(server: Server, model: Any = None, choice: Any = "required") -> Any:
    model = (model or openai_of(server)).bind_tools(
        [SAVE], tool_choice=choice, parallel_tool_calls=False
    )
    whole: Any = None
    for chunk in model.stream(PLAN):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    return parsed(call["args"])


def structured(server: Server, method: Any) -> Any:
    return parsed(openai_of(server).with_structured_output(Week, method=method).invoke(PLAN))


def structured_streamed(server: Server, method: Any, of: Any = openai_of) -> Any:
    model = of(server).with_structured_output(Week, method=method)
    return parsed(list(model.stream(PLAN))[-1])


def agent_tool_strategy(server: Server) -> Any:
    """The agent's answer is a call of a tool that it adds."""
    agent = _tool_strategy(server)
    return parsed(agent.invoke({"messages": [HumanMessage(PLAN)]})["structured_response"])


def agent_tool_strategy_streamed(server: Server) -> Any:
    """The agent reads the model's answer as a stream."""
    answers: list[Any] = []
    pieces = 0
    asked = {"messages": [HumanMessage(PLAN)]}
    for kind, part in _tool_strategy(server).stream(asked, stream_mode=["messages", "values"]):
        pieces += kind == "messages"
        if kind == "values" and "structured_response" in part:
            answers.append(part["structured_response"])
    assert pieces > 2
    return parsed(answers[-1])


def _tool_strategy(server: Server) -> Any:
    # The demo model may call for ever, and the agent accepts one call.
    model = openai_of(server, model_kwargs={"parallel_tool_calls": False})
    return create_agent(model, tools=[], response_format=ToolStrategy(Week))


@wrap_model_call
def call_once(request: Any, handler: Any) -> Any:
    """Takes the tools away after the first call, since the demo model may call them for ever."""
    called = any(isinstance(one, ToolMessage) for one in request.messages)
    return handler(request.override(tools=[]) if called else request)


def agent_provider_strategy(server: Server) -> Any:
    """The agent may call tools, and its answer follows a schema."""
    model = openai_of(server, model_kwargs={"parallel_tool_calls": False})
    agent = create_agent(
        model, tools=[SAVE], response_format=ProviderStrategy(Week), middleware=[call_once]
    )
    return parsed(agent.invoke({"messages": [HumanMessage(PLAN)]})["structured_response"])


def agent_streamed(server: Server) -> Any:
    agent = create_agent(openai_of(server), tools=[SAVE], system_prompt="Be kind.")
    pieces = [
        message.text
        for message, _ in agent.stream({"messages": [HumanMessage(STORY)]}, stream_mode="messages")
    ]
    return told("".join(pieces))


def responses(server: Server) -> Any:
    return _loop(openai_of(server, use_responses_api=True), TOOL, "none")


def responses_streamed(server: Server) -> Any:
    model = openai_of(server, use_responses_api=True)
    pieces = [one.text for one in model.stream(STORY)]
    assert len(pieces) > 2
    return told("".join(pieces))


def completion(server: Server) -> Any:
    model = OpenAI(
        base_url=server.openai,
        api_key="none",
        model=server.model,
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )
    return told("".join(model.stream("Once upon a time")))


def claude_invoke(server: Server) -> Any:
    return told(anthropic_of(server).invoke(STORY).text)


def claude_stream(server: Server) -> Any:
    return told("".join(one.text for one in anthropic_of(server).stream(STORY)))


def claude_tools(server: Server) -> Any:
    return _loop(anthropic_of(server), TOOL, None, parallel_tool_calls=False)


def claude_structured(server: Server) -> Any:
    return parsed(anthropic_of(server).with_structured_output(Week).invoke(PLAN))


def claude_json_schema(server: Server) -> Any:
    model = anthropic_of(server).with_structured_output(Week, method="json_schema")
    return parsed(model.invoke(PLAN))


def batch(server: Server) -> Any:
    found = openai_of(server).batch([STORY, f"{STORY} Be brief.", "Once upon a time"])
    return json.dumps([told(one.text) for one in found])


if __name__ == "__main__":
    serve_cases(
        {
            "invoke": invoke,
            "stream": stream,
            "astream": astream,
            "batch": batch,
            "bind_tools loop": bind_tools,
            "bind_tools, streamed": bind_tools_streamed,
            "with_structured_output, json_schema": lambda server: structured(server, "json_schema"),
            "with_structured_output, function_calling": lambda server: structured(
                server, "function_calling"
            ),
            "with_structured_output, json_schema, streamed": lambda server: structured_streamed(
                server, "json_schema"
            ),
            "with_structured_output, function_calling, streamed": lambda server: (
                structured_streamed(server, "function_calling")
            ),
            "agent, ToolStrategy": agent_tool_strategy,
            "agent, ToolStrategy, streamed": agent_tool_strategy_streamed,
            "agent, ProviderStrategy": agent_provider_strategy,
            "agent, streamed": agent_streamed,
            "responses loop": responses,
            "responses, streamed": responses_streamed,
            "OpenAI, streamed": completion,
            "ChatAnthropic": claude_invoke,
            "ChatAnthropic, streamed": claude_stream,
            "ChatAnthropic, bind_tools loop": claude_tools,
            "ChatAnthropic, bind_tools, streamed": lambda server: bind_tools_streamed(
                server, anthropic_of(server), TOOL
            ),
            "ChatAnthropic, function calling": claude_structured,
            "ChatAnthropic, json_schema": claude_json_schema,
            "ChatAnthropic, json_schema, streamed": lambda server: structured_streamed(
                server, "json_schema", anthropic_of
            ),
        }
    )
