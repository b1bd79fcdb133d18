"""The client libraries: what to install, and the script that uses each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ClientLibrary:
    """A library with the script of its cases."""

    # The name of the package.
    name: str
    # Arguments of `pip install`, for each call.
    requirements: tuple[tuple[str, ...], ...]
    script: str

    @property
    def path(self) -> Path:
        """The script."""
        return Path(__file__).with_name(self.script)


CLIENTS = {
    library.name: library
    for library in (
        ClientLibrary("openai", (("openai==3.57.0",),), "openai_app.py"),
        ClientLibrary("anthropic", (("anthropic==2.13.0",),), "anthropic_app.py"),
        ClientLibrary(
            "langchain",
            (("langchain==1.5.2", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10"),),
            "langchain_app.py",
        ),
        ClientLibrary("litellm", (("litellm==1.110.2",),), "litellm_app.py"),
        ClientLibrary("instructor", (("instructor==1.17.0",),), "instructor_app.py"),
        ClientLibrary(
            "pydantic-ai-slim",
            (("pydantic-ai-slim[openai,anthropic]==2.68.0",),),
            "pydantic_ai_app.py",
        ),
        ClientLibrary("openai-agents", (("openai-agents==0.24.0",),), "openai_agents_app.py"),
        ClientLibrary(
            "llama-index-llms-openai-like",
            (("llama-index-llms-openai-like==0.8.1",),),
            "llama_index_app.py",
        ),
        ClientLibrary("smolagents", (("smolagents[openai]==1.26.0",),), "smolagents_app.py"),
        ClientLibrary("dspy", (("dspy==3.4.1",),), "dspy_app.py"),
    )
}
