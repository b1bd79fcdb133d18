"""What the parsers need to know of a request's tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# The tools of a request, as OpenAI defines them: {"type": "function", "function": {"name": ...}}.
Tools = Sequence[Mapping[str, Any]]
Schema = Mapping[str, Any]


def tool_names(tools: Tools) -> frozenset[str]:
    """Returns the names of the functions."""
    return frozenset(str(function.get("name")) for function in _functions(tools))


def parameters_of(tools: Tools, name: str) -> Schema:
    """Returns the JSON schema of a function's parameters. Empty if there is none."""
    for function in _functions(tools):
        if function.get("name") == name:
            return mapping(function.get("parameters"))
    return {}


def _functions(tools: Tools) -> list[Mapping[str, Any]]:
    return [mapping(tool.get("function")) for tool in tools if tool.get("function")]


def mapping(value: object) -> Mapping[str, Any]:
    """Returns the value, or an empty mapping if it is none."""
    return value if isinstance(value, Mapping) else {}
