"""The tools of a chat request: which of them the answer may call, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvrelay.errors import InvalidArgument
from router.api.http.chat.models import Tool, ToolChoice
from router.api.http.json_writing import written

# Limit on the characters of the JSON of all tools, which every prompt of the conversation contains.
MAX_TOOLS_LENGTH = 256 * 2**10
Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a chat request."""

    tools: tuple[Tool, ...]
    # The tools as JSON, for the chat template.
    described: str
    # auto: the model may call tools. required: the answer consists of calls.
    mode: Mode
    # The only function that the answer calls, exactly once; None for the model's choice.
    named: str | None = None
    # Whether the answer may have several calls.
    parallel: bool = True


def tool_use_of(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> ToolUse | None:
    """Returns the use of tools that a request asks for; None without tools. `parallel`: the
    request's parallel_tool_calls. Raises InvalidArgument.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidArgument(
                "tool_choice asks for a call, and the request has no tools; give tools",
                field="tool_choice",
            )
        return None
    names = [one["function"]["name"] for one in tools]
    twice = next((one for one in names if names.count(one) > 1), None)
    if twice is not None:
        raise InvalidArgument(
            f"tools has two functions with the name {twice}; rename one", field="tools"
        )
    named = choice["function"]["name"] if isinstance(choice, dict) else None
    if named is not None and named not in names:
        raise InvalidArgument(
            f"tool_choice names {named}, which is not in tools; give one of the names there",
            field="tool_choice",
        )
    mode: Mode = "required" if isinstance(choice, dict) else choice or "auto"
    described = written(tools, MAX_TOOLS_LENGTH)
    if described is None:
        raise InvalidArgument(
            f"tools have more than {MAX_TOOLS_LENGTH} characters of JSON; shorten their "
            "descriptions or give fewer",
            field="tools",
        )
    return ToolUse(tuple(tools), described, mode, named, parallel is not False)
