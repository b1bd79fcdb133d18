"""The interface of the parsers."""

from __future__ import annotations

from typing import Protocol

from router.frontend.answer_parsers.events import Event


class AnswerParser(Protocol):
    """Parses one answer. The events do not depend on where the answer is cut into pieces, except
    that a text may come in fewer or more events.
    """

    def push(self, text: str) -> list[Event]:
        """Parses the next piece of the answer. Holds back text that more text could turn into a
        marker or a call.
        """

    def finish(self) -> list[Event]:
        """Returns the events of the text that was held back. Call it once, after the last piece."""
