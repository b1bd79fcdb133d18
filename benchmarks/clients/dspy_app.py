"""An application on the model class of DSPy. Its programs ask for JSON without a schema, which the
demo model cannot give.
"""

from __future__ import annotations

from typing import Any

import dspy
from case_server import Server, serve_cases
from week import STORY, told


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


class Telling(dspy.Module):
    """A program that asks once, in plain words."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._model = model_of(server)

    def forward(self, question: str) -> Any:
        (found,) = self._model(question)
        return dspy.Prediction(answer=found if isinstance(found, str) else found["text"])


def streamed(server: Server) -> Any:
    """DSPy's own way to stream: the program runs, and the pieces of its answer come meanwhile."""
    pieces = list(dspy.streamify(Telling(server), async_streaming=False)(question=STORY))
    assert len(pieces) > 2
    return told(pieces[-1].answer)


if __name__ == "__main__":
    serve_cases({"LM": chat, "LM, streamed": streamed})
