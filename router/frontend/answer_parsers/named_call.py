"""The answer of a model that has to call one function."""

from __future__ import annotations

from router.frontend.answer_parsers.events import CallArguments, CallStarted, Event


class NamedCallParser:
    """Takes the whole answer for the arguments of one call. See AnswerParser."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> list[Event]:
        """See AnswerParser."""
        events: list[Event] = [] if self._begun else [CallStarted(0, self._name)]
        self._begun = True
        return [*events, CallArguments(0, text)] if text else events

    def finish(self) -> list[Event]:
        """See AnswerParser."""
        return self.push("") if not self._begun else []
