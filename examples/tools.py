"""Lets the model call functions of this program, with OpenAI's client (`pip install openai`)."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from openai import APIConnectionError, OpenAI

BASE = os.environ.get("KVRELAY_HTTP", "http://127.0.0.1:8000")
QUESTIONS = ("What is 17 times 23?", "What is the weather in Paris?", "Who are you?")


def multiply(a: int, b: int) -> str:
    """Multiplies two numbers."""
    return str(a * b)


def get_weather(city: str) -> str:
    """Returns the weather in a city."""
    return {"Paris": "sunny, 21 degrees"}.get(city, "cloudy, 12 degrees")


FUNCTIONS = {"multiply": multiply, "get_weather": get_weather}


def described(name: str, **types: str) -> dict[str, Any]:
    """A function as the API describes it."""
    properties = {argument: {"type": kind} for argument, kind in types.items()}
    schema = {"type": "object", "properties": properties, "required": list(types)}
    function = {"name": name, "description": FUNCTIONS[name].__doc__, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [described("multiply", a="integer", b="integer"), described("get_weather", city="string")]


def main() -> None:
    client = OpenAI(base_url=f"{BASE}/v1", api_key="none")
    options: Any = {"model": client.models.list().data[0].id, "tools": TOOLS, "temperature": 0}
    for question in QUESTIONS:
        print(f"> {question}")
        messages: Any = [{"role": "user", "content": question}]
        answer = client.chat.completions.create(messages=messages, **options)
        for call in answer.choices[0].message.tool_calls or []:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            print(f"  {call.function.name}({call.function.arguments}) returns {result}")
            messages += [answer.choices[0].message]
            messages += [{"role": "tool", "tool_call_id": call.id, "content": result}]
            answer = client.chat.completions.create(messages=messages, **options)
        print(answer.choices[0].message.content)


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(f"Nothing answers at {BASE}; start a cluster with `kvrelay serve`.")
