"""The other processes of a router, for what a client may ask any of them: metrics and status.

Each process answers at a Unix socket in a folder of the router, which only this user can enter. A
question is a line of JSON, `[TOPIC, {...}]`. An answer is a line with its number of bytes, and the
bytes. It is empty if the process does not know the topic.

The other processes may be of another version, where the program was replaced meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvrelay.errors import ConfigError
from kvrelay.process.telemetry import get_logger

# A process that takes longer, for example because it starts, has its last answer.
ANSWER_S = 0.5
# For so long. Later it is left out.
LAST_ANSWER_S = 10.0
# Limits of a question and of an answer.
MAX_QUESTION = 2**16
MAX_ANSWER = 2**24

T = TypeVar("T")
Answer = Callable[..., Awaitable[bytes]]

log = get_logger("router.sibling_processes")


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
        # When it came, and the last answer, by the socket of the process and the question.
        self._last: dict[tuple[str, bytes], tuple[float, bytes]] = {}
        # Topics of which it has been told.
        self._not_understood: set[str] = set()

    @property
    def number(self) -> int | None:
        """The number of this process, or None in a router of one process."""
        return None if self._place is None else self._place.number

    @property
    def folder(self) -> Path | None:
        """The folder of the router's processes; None in a router of one process."""
        return None if self._place is None else self._place.folder

    @property
    def others(self) -> int:
        """The number of other processes."""
        return 0 if self._place is None else len(self._place.others)

    def answer(self, topic: str, answer: Answer) -> None:
        """Sets how this process answers questions on a topic. Their fields are keyword
        arguments.
        """
        self._answers[topic] = answer

    async def ask(self, topic: str, read: Callable[[bytes], T], **fields: object) -> list[T]:
        """Returns the answers of the other processes, by their numbers, as `read` understands them.

        For a process that gives none within ANSWER_S, this is its last one for LAST_ANSWER_S, so
        that sums do not drop while it is busy. A process is left out if `read` fails.
        """
        if self._place is None:
            return []
        question = json.dumps([topic, fields]).encode() + b"\n"
        await asyncio.gather(*(self._ask(one, question) for one in self._place.others))
        now = asyncio.get_running_loop().time()
        self._last = {key: one for key, one in self._last.items() if now - one[0] < LAST_ANSWER_S}
        texts = (self._last.get((path, question)) for path in self._place.others)
        answers = (self._read(topic, one[1], read) for one in texts if one is not None and one[1])
        return [one for one in answers if one is not None]

    async def _ask(self, path: str, question: bytes) -> None:
        """Keeps the answer. An empty one means that the process knows no answer."""
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(path)
                with closing(writer):
                    writer.write(question)
                    text = await _whole(reader)
        except TimeoutError:
            return
        except (EOFError, OSError, ValueError):
            # It has ended, or is another program.
            self._last.pop((path, question), None)
            return
        self._last[path, question] = asyncio.get_running_loop().time(), text

    def _read(self, topic: str, text: bytes, read: Callable[[bytes], T]) -> T | None:
        try:
            return read(text)
        except Exception:
            # Whatever another program wrote, this process goes on without it.
            if topic not in self._not_understood:
                self._not_understood.add(topic)
                log.exception("sibling_not_understood", topic=topic)
            return None

    async def run(self) -> None:
        """Answers until cancelled."""
        if self._place is None:
            return
        path = self._place.socket(self._place.number)
        with suppress(FileNotFoundError):
            # Of an earlier process with this number.
            os.unlink(path)
        server = await asyncio.start_unix_server(self._serve, path, limit=MAX_QUESTION)
        async with server:
            await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            try:
                if question := await reader.readline():
                    text = await self._answer(question)
                    writer.write(b"%d\n%b" % (len(text), text))
                    await writer.drain()
            except OSError:
                # The other process has stopped waiting.
                return
            except (RecursionError, TypeError, ValueError) as error:
                log.warning("sibling_not_answered", reason=str(error)[:200])

    async def _answer(self, question: bytes) -> bytes:
        topic, fields = json.loads(question)
        return await self._answers[topic](**fields) if topic in self._answers else b""


async def _whole(reader: asyncio.StreamReader) -> bytes:
    """Reads an answer. Raises EOFError for a part of one, and ValueError for anything else or more
    than MAX_ANSWER bytes.
    """
    size = int(await reader.readline())
    if not 0 <= size <= MAX_ANSWER:
        raise ValueError(f"an answer of {size} bytes")
    return await reader.readexactly(size)
