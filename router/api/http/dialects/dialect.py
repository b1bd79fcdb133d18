"""What the endpoint needs of a dialect: how a request is parsed, and how its answer is written."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvrelay.errors import KvRelayError
from kvrelay.wire.inference import GenerateResponse
from router.api.http.chat.answer import ChatAnswer
from router.api.http.choices import Choices
from router.api.http.completion import Completion
from router.api.http.logprobs import LogprobsText

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Head:
    """The members that all bodies of one answer share."""

    id: str
    created: int  # unix seconds
    model: str


class AnswerShape(Protocol):
    """Writes one answer: either as a stream of events or as a whole body."""

    def begin(self) -> str:
        """Returns the events before the first response of a stream. The prompt has been read."""

    def chunk(self, index: int, response: GenerateResponse, logprobs: LogprobsText | None) -> str:
        """Returns the events for the next response of the choice `index`."""

    def end(self) -> str:
        """Returns the events after the last response of all choices."""

    def failed(self, error: KvRelayError) -> str:
        """Returns the events of a stream that ends with an error."""

    def hear(self, index: int, response: GenerateResponse) -> None:
        """Takes the next response of the choice `index`, of a whole answer."""

    def whole(
        self, answers: Sequence[GenerateResponse], logprobs: Sequence[LogprobsText | None]
    ) -> Generator[int, None, list[bytes]]:
        """Writes the parts of the body of a whole answer, in the steps of
        router.runtime.loop_slices.

        - answers: the last response of each choice, with the token ids of all.
        """


@dataclass(frozen=True, slots=True)
class Opened:
    """An answer that has begun: what a dialect writes it from."""

    choices: Choices
    head: Head
    # Prefix of each choice's text; empty for none.
    echoes: Sequence[str]
    # The message of each choice, for chats.
    answers: Sequence[ChatAnswer]


@dataclass(frozen=True, slots=True)
class Dialect:
    """A route that generates text."""

    # Begins the ids of answers.
    id_prefix: str
    # Takes the body, and the request's id if the body has none.
    parse: Callable[[Mapping[str, Any], str], Completion]
    shape: Callable[[Opened], AnswerShape]
