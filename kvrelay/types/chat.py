"""Values of a conversation. Frozen, slotted, without I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made in an earlier turn."""

    id: str
    name: str
    # The text that the model wrote: a JSON object, unless the model broke off.
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of a conversation."""

    role: str
    # None: the message consists of calls.
    content: str | None
    # Of the assistant.
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    # Of a tool: the call that the message answers, and the tool's name.
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the chat template gets besides the messages, and what the answer's text keeps."""

    # JSON list of tools as OpenAI describes them; empty without tools.
    tools: str = ""
    # JSON object of further variables of the template; empty for none.
    template_kwargs: str = ""
    # Special tokens that appear in the answer's text.
    markers: tuple[str, ...] = ()


WITHOUT_TOOLS = ChatOptions()
