"""An application on the model class that the agents of smolagents use."""

from __future__ import annotations

from typing import Any

from case_server import Server, serve_cases
from smolagents import ChatMessage, OpenAIServerModel, Tool
from smolagents.models import agglomerate_stream_deltas
from week import PLAN, SAVED, STORY, Day, checked, closed, told

ASK = [ChatMessage(role="user", content=[{"type": "text", "text": PLAN}])]
CHOICES = {
    name: {"type": "string", "description": f"The {name}.", "enum": values}
    for name, values in {
        "activity": Day.model_json_schema()["properties"]["activity"]["enum"],
        "weather": Day.model_json_schema()["properties"]["weather"]["enum"],
        "remark": [f"{PLAN} {STORY}", f"{STORY} {PLAN}"],
    }.items()
}


class SaveDay(Tool):
    name = "save_day"
    description = "Saves the plan of a day."
    inputs = CHOICES
    output_type = "string"

    def forward(self, activity: str, weather: str, remark: str) -> str:
        return SAVED


def model_of(server: Server) -> OpenAIServerModel:
    return OpenAIServerModel(
        model_id=server.model,
        api_base=server.openai,
        api_key="none",
        temperature=0,
        parallel_tool_calls=False,
    )


def generate(server: Server) -> Any:
    model = OpenAIServerModel(
        model_id=server.model, api_base=server.openai, api_key="none", temperature=0
    )
    asked = ChatMessage(role="user", content=[{"type": "text", "text": STORY}])
    return told(model.generate([asked]).content)


def generate_stream(server: Server) -> Any:
    model = OpenAIServerModel(
        model_id=server.model, api_base=server.openai, api_key="none", temperature=0
    )
    asked = ChatMessage(role="user", content=[{"type": "text", "text": STORY}])
    return told("".join(one.content or "" for one in model.generate_stream([asked])))


def tools(server: Server) -> Any:
    found = model_of(server).generate(ASK, tools_to_call_from=[SaveDay()])
    (call,) = found.tool_calls
    assert call.function.name == "save_day"
    return str(call.function.arguments)


def tools_streamed(server: Server) -> Any:
    """The pieces of the call, put together as the agents of the library do it."""
    pieces = list(model_of(server).generate_stream(ASK, tools_to_call_from=[SaveDay()]))
    found = agglomerate_stream_deltas(pieces)
    (call,) = found.tool_calls
    assert call.function.name == "save_day"
    return str(call.function.arguments)


def schema_streamed(server: Server) -> Any:
    wanted = {"type": "json_schema", "json_schema": {"name": "week", "schema": closed()}}
    model = OpenAIServerModel(
        model_id=server.model, api_base=server.openai, api_key="none", temperature=0
    )
    pieces = list(model.generate_stream(ASK, response_format=wanted))
    return checked("".join(one.content or "" for one in pieces))


def schema(server: Server) -> Any:
    wanted = {"type": "json_schema", "json_schema": {"name": "week", "schema": closed()}}
    model = OpenAIServerModel(
        model_id=server.model, api_base=server.openai, api_key="none", temperature=0
    )
    return checked(model.generate(ASK, response_format=wanted).content)


if __name__ == "__main__":
    serve_cases(
        {
            "generate": generate,
            "generate_stream": generate_stream,
            "tools": tools,
            "tools, streamed": tools_streamed,
            "response_format": schema,
            "response_format, streamed": schema_streamed,
        }
    )
