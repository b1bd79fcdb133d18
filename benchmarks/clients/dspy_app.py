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


if __name__ == "__main__":
    serve_cases({"LM": chat})
