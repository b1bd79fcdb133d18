"""The base of the parsers: a parser is a generator that reads the answer from first to last."""

from __future__ import annotations

from abc import ABC, abstractmethod

from router.frontend.answer_parsers.events import (
    CallArguments,
    CallStarted,
    Content,
    Event,
    Reasoning,
)
from router.frontend.answer_parsers.text_reader import MarkerSet, Steps, TextReader


class SteppedParser(ABC):
    """Runs a generator over an answer. See AnswerParser.

    A subclass implements `answer`, which reads from `reader` and adds events.
    """

    def __init__(self) -> None:
        self.reader = TextReader()
        self._events: list[Event] = []
        self._num_calls = 0
        self._steps = self.answer()

    @abstractmethod
    def answer(self) -> Steps[None]:
        """Reads the answer up to its end."""

    def push(self, text: str) -> list[Event]:
        """See AnswerParser."""
        self.reader.push(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """See AnswerParser."""
        self.reader.finish()
        return self._advance()

    def add(self, *events: Event) -> None:
        """Adds events."""
        self._events += events

    def add_content(self, text: str) -> None:
        """Adds visible text."""
        if text:
            self.add(Content(text))

    def add_reasoning(self, text: str) -> None:
        """Adds text of the model's thinking."""
        if text:
            self.add(Reasoning(text))

    def start_call(self, name: str) -> None:
        """Announces a call. The text of an attempted call is no longer kept."""
        self.reader.release()
        self.add(CallStarted(self._num_calls, name))
        self._num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Adds JSON text to the arguments of the call that was announced last."""
        if text:
            self.add(CallArguments(self._num_calls - 1, text))

    def attempt(self, marker: str, call: Steps[bool]) -> Steps[bool]:
        """Reads a call that begins with a marker, which was taken already. If `call` returns False,
        it has announced no call, and the text that it took is added as content.
        """
        self.reader.keep()
        is_call = yield from call
        kept = self.reader.release()
        if not is_call:
            self.add_content(marker + kept)
        return is_call

    def next_call(self, begin: tuple[str, ...], end: tuple[str, ...] = ()) -> Steps[str]:
        """Takes the end of a call, and the marker of a next call if it follows.

        Drops whitespace and the markers of `end`. The last whitespace is content if neither a call
        nor the end of the answer follows it. Returns the marker of the next call, or "".
        """
        spaces = yield from self.reader.spaces()
        while (yield from self.reader.accept(*end)):
            spaces = yield from self.reader.spaces()
        marker = yield from self.reader.accept(*begin)
        if not marker and not self.reader.at_end:
            self.add_content(spaces)
        return marker

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        return events


class MarkedParser(SteppedParser):
    """Parses a format in which a marker begins each call, or the first of several calls. All other
    text is content.
    """

    def __init__(self, begin: tuple[str, ...], end: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._begin = begin
        self._end = end

    @abstractmethod
    def call(self, marker: str) -> Steps[bool]:
        """Reads the calls that the marker begins. Returns False if the first one is malformed; then
        no call was announced.
        """

    def answer(self) -> Steps[None]:
        """See SteppedParser."""
        markers = MarkerSet(*self._begin)
        while marker := (yield from self.reader.until(markers, self.add_content)):
            yield from self.calls(marker)

    def calls(self, marker: str, spaces: str = "") -> Steps[None]:
        """Reads the calls that follow each other, after the marker of the first call. `spaces` is
        the text before the marker; it is content if the first call is malformed.
        """
        while marker and (yield from self.attempt(spaces + marker, self.call(marker))):
            spaces = ""
            marker = yield from self.next_call(self._begin, self._end)
