"""An application on DSPy: programs whose answers are parsed from chats, JSON and tool calls."""

from __future__ import annotations

from typing import Any

import dspy
from case_server import Server, serve_cases
from week import PLAN, STORY, Week, parsed, told


class Plan(dspy.Signature):
    """Plans a week."""

    question: str = dspy.InputField()
    week: Week = dspy.OutputField()


def model_of(server: Server) -> Any:
    return dspy.LM(
        f"openai/{server.model}",
        api_base=server.openai,
        api_key="none",
        temperature=0,
        max_tokens=2000,
        cache=False,
        num_retries=0,
    )


def chat(server: Server) -> Any:
    (found,) = model_of(server)(STORY)
    return told(found if isinstance(found, str) else found["text"])


def json_adapter(server: Server) -> Any:
    with dspy.context(lm=model_of(server), adapter=dspy.JSONAdapter()):
        return parsed(dspy.Predict(Plan)(question=PLAN).week)


if __name__ == "__main__":
    serve_cases({"LM": chat, "JSONAdapter": json_adapter})
