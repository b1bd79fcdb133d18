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


def parameter_schemas(tools: Tools, name: str) -> Mapping[str, Any]:
    """Returns the JSON schemas of a function's parameters, by key. Empty if there are none."""
    for function in _functions(tools):
        if function.get("name") == name:
            return _mapping(_mapping(function.get("parameters")).get("properties"))
    return {}


def _functions(tools: Tools) -> list[Mapping[str, Any]]:
    return [_mapping(tool.get("function")) for tool in tools if tool.get("function")]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
