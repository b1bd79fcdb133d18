"""The other processes of a router, for what a client may ask any of them: metrics and status.

Each process answers at a Unix socket in a folder of the router, which only this user can enter. A
question is a line of JSON, `[TOPIC, {...}]`, and the answer is everything until the end of the
connection. An answer is empty if the process does not know the topic.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import ConfigError
from kvrelay.process.telemetry import get_logger

# A process that takes longer, for example because it starts, is left out.
ANSWER_S = 0.5
_MAX_QUESTION = 2**16

Answer = Callable[..., Awaitable[bytes]]

log = get_logger("router.siblings")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a process among the processes of its router."""

    folder: Path
    number: int
    processes: int

    @classmethod
    def parse(cls, text: str, processes: int) -> Place:
        """Reads FOLDER:NUMBER. Raises ConfigError."""
        folder, _, number = text.rpartition(":")
        if not number.isdecimal() or int(number) >= processes or not Path(folder).is_dir():
            raise ConfigError(
                f"--sibling is {text!r:.200}; allowed is FOLDER:NUMBER with a number below "
                f"router.processes, {processes}. The router passes it to its own processes"
            )
        return cls(Path(folder), int(number), processes)

    def socket(self, number: int) -> str:
        """The path of the socket of one of the processes."""
        return str(self.folder / f"{number}.sock")

    @property
    def others(self) -> tuple[str, ...]:
        """The sockets of the other processes."""
        return tuple(
            self.socket(number) for number in range(self.processes) if number != self.number
        )


class Siblings:
    """Asks the other processes of this router, and answers them. A router of one process has
    none.
    """

    def __init__(self, place: Place | None = None) -> None:
        self._place = place
        self._answers: dict[str, Answer] = {}

    @property
    def number(self) -> int | None:
        """The number of this process, or None in a router of one process."""
        return None if self._place is None else self._place.number

    @property
    def folder(self) -> Path | None:
        """The folder of the router's processes; None in a router of one process."""
        return None if self._place is None else self._place.folder

    def answer(self, topic: str, answer: Answer) -> None:
        """Sets how this process answers questions on a topic. Their fields are keyword
        arguments.
        """
        self._answers[topic] = answer

    async def ask(self, topic: str, **fields: object) -> list[bytes]:
        """Returns the answers of the processes that give one within ANSWER_S, by their numbers."""
        if self._place is None:
            return []
        question = json.dumps([topic, fields]).encode() + b"\n"
        answers = await asyncio.gather(*(_ask(one, question) for one in self._place.others))
        return [one for one in answers if one]

    async def run(self) -> None:
        """Answers until cancelled."""
        if self._place is None:
            return
        path = self._place.socket(self._place.number)
        with suppress(FileNotFoundError):
            # Of an earlier process with this number.
            os.unlink(path)
        server = await asyncio.start_unix_server(self._serve, path, limit=_MAX_QUESTION)
        async with server:
            await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            try:
                topic, fields = json.loads(await reader.readline())
                if topic in self._answers:
                    writer.write(await self._answers[topic](**fields))
                await writer.drain()
            # Another version of this program asks, or a process that has ended meanwhile.
            except (ValueError, TypeError, OSError) as error:
                log.warning("sibling_not_answered", reason=str(error))


async def _ask(path: str, question: bytes) -> bytes:
    """Returns the answer, empty if there is none in time."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(path)
            with closing(writer):
                writer.write(question)
                return await reader.read()
    return b""
