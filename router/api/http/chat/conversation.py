"""Builds the messages of a chat from the items of dialects that have more than messages. Pure."""

from __future__ import annotations

from kvrelay.types.chat import ChatMessage, ToolCall


class Conversation:
    """A growing conversation. What the assistant says without a break is one message: templates
    expect its text, thinking and calls together.
    """

    def __init__(self, separator: str | None = None) -> None:
        """`separator`: joins messages of the user that follow each other; None keeps them apart."""
        self._separator = separator
        self._messages: list[ChatMessage] = []
        self._answer: _Answer | None = None
        # Texts of the user that are going to be joined.
        self._asked: list[str] = []
        # By id.
        self._names: dict[str, str] = {}

    def say(self, role: str, text: str) -> None:
        """Adds a message of a role other than assistant and tool."""
        if role == "user" and self._separator is not None:
            self._end_answer()
            self._asked.append(text)
            return
        self._end()
        self._messages.append(ChatMessage(role, text))

    def answer(self, text: str) -> None:
        """Adds text of the assistant."""
        self._growing.texts.append(text)

    def think(self, text: str) -> None:
        """Adds thinking of the assistant."""
        self._growing.thoughts.append(text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Adds a call of the assistant."""
        self._names[call_id] = name
        self._growing.calls.append(ToolCall(call_id, name, arguments))

    def result(self, call_id: str, text: str) -> None:
        """Adds the result of a call."""
        self._end()
        name = self._names.get(call_id)
        self._messages.append(ChatMessage("tool", text, tool_call_id=call_id, name=name))

    def messages(self) -> tuple[ChatMessage, ...]:
        """Returns the messages."""
        self._end()
        return tuple(self._messages)

    @property
    def _growing(self) -> _Answer:
        if self._answer is None:
            self._end()
            self._answer = _Answer()
        return self._answer

    def _end(self) -> None:
        self._end_answer()
        if self._asked:
            self._messages.append(ChatMessage("user", (self._separator or "").join(self._asked)))
            self._asked = []

    def _end_answer(self) -> None:
        if self._answer is not None:
            self._messages.append(self._answer.message())
            self._answer = None


class _Answer:
    """A growing message of the assistant."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[ToolCall] = []

    def message(self) -> ChatMessage:
        return ChatMessage(
            "assistant",
            # Templates may write an empty text for a message of calls.
            "".join(self.texts) if self.texts or not self.calls else None,
            tool_calls=tuple(self.calls),
            reasoning="".join(self.thoughts) or None,
        )
