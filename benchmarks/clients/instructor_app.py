"""An application on instructor, in each mode that it has for servers of OpenAI's API."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from case_server import Server, serve_cases
from week import PLAN, Week, parsed

ASK: list[Any] = [{"role": "user", "content": PLAN}]


def create(server: Server, mode: instructor.Mode, **more: Any) -> Any:
    client = instructor.from_openai(
        openai.OpenAI(base_url=server.openai, api_key="none", max_retries=0), mode=mode
    )
    found = client.chat.completions.create(
        model=server.model,
        messages=ASK,
        response_model=Week,
        temperature=0,
        max_retries=0,
        **more,
    )
    return parsed(found)


def partial(server: Server, mode: instructor.Mode) -> Any:
    """A stream of weeks, each more complete than the one before."""
    client = instructor.from_openai(
        openai.OpenAI(base_url=server.openai, api_key="none", max_retries=0), mode=mode
    )
    found = list(
        client.chat.completions.create_partial(
            model=server.model,
            messages=ASK,
            response_model=Week,
            temperature=0,
            max_retries=0,
        )
    )
    assert len(found) > 2
    return parsed(found[-1].model_dump())


if __name__ == "__main__":
    serve_cases(
        {
            "TOOLS": lambda server: create(server, instructor.Mode.TOOLS),
            "TOOLS_STRICT": lambda server: create(server, instructor.Mode.TOOLS_STRICT),
            "JSON_SCHEMA": lambda server: create(server, instructor.Mode.JSON_SCHEMA),
            "RESPONSES_TOOLS": lambda server: create(server, instructor.Mode.RESPONSES_TOOLS),
            "TOOLS, streamed": lambda server: partial(server, instructor.Mode.TOOLS),
            "TOOLS_STRICT, streamed": lambda server: partial(server, instructor.Mode.TOOLS_STRICT),
            "JSON_SCHEMA, streamed": lambda server: partial(server, instructor.Mode.JSON_SCHEMA),
        }
    )
