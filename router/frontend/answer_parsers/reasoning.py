"""Splits the model's thinking from the rest of an answer."""

from __future__ import annotations

from dataclasses import dataclass

from router.frontend.answer_parsers.parser import AnswerParser
from router.frontend.answer_parsers.stepped_parser import SteppedParser
from router.frontend.answer_parsers.text_reader import MarkerSet, Steps


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers around the thinking. Both may be special tokens."""

    begin: str
    end: str

    def begun(self, prompt: str) -> bool:
        """Whether the prompt ends with the marker that begins the thinking."""
        return prompt.rstrip().endswith(self.begin)


# DeepSeek R1, Qwen 3 and others.
THINK = ReasoningMarkers("<think>", "</think>")
# Magistral.
BRACKET_THINK = ReasoningMarkers("[THINK]", "[/THINK]")
REASONING_MARKERS = (THINK, BRACKET_THINK)


def reasoning_markers_of(chat_template: str) -> ReasoningMarkers | None:
    """Returns the markers that a chat template contains, or None if it contains none."""
    found = (markers for markers in REASONING_MARKERS if markers.end in chat_template)
    return next(found, None)


class ReasoningSplitter(SteppedParser):
    """Turns the thinking at the start of an answer into reasoning, and gives the rest to a parser.

    `begun` tells that the prompt ended inside the thinking. Then the answer may repeat the marker.
    Markers after the first other text are no markers, so that content and arguments may hold them.
    Whitespace after a marker is dropped. Without a parser, the rest is content.
    """

    def __init__(
        self,
        parser: AnswerParser | None = None,
        markers: ReasoningMarkers = THINK,
        begun: bool = False,
    ) -> None:
        super().__init__()
        self._parser = parser
        self._markers = markers
        self._begun = begun

    def answer(self) -> Steps[None]:
        """See SteppedParser."""
        spaces = yield from self.reader.spaces()
        begin = yield from self.reader.accept(self._markers.begin)
        if begin or self._begun:
            yield from self.reader.spaces()
            yield from self.reader.until(MarkerSet(self._markers.end), self.add_reasoning)
            yield from self.reader.spaces()
        else:
            self._pass_on(spaces)
        self._pass_on(self.reader.take())
        while not self.reader.at_end:
            yield
            self._pass_on(self.reader.take())
        if self._parser is not None:
            self.add(*self._parser.finish())

    def _pass_on(self, text: str) -> None:
        if self._parser is None:
            self.add_content(text)
        elif text:
            self.add(*self._parser.push(text))
