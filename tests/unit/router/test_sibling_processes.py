"""Questions between the processes of a router, whatever the other side does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvrelay.errors import ConfigError
from router import sibling_processes
from router.observability.traffic import Traffic
from router.sibling_processes import Place, Siblings


@asynccontextmanager
async def running(*loops: Coroutine[None, None, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(one) for one in loops]
    try:
        yield
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def echo(**fields: object) -> bytes:
    return repr(fields).encode()


async def listening(place: Place, number: int) -> None:
    async with asyncio.timeout(20):
        while not await asyncio.to_thread(Path(place.socket(number)).exists):
            await asyncio.sleep(0.005)


async def test_answers_of_all_others_in_their_order(tmp_path: Path) -> None:
    places = [Place(tmp_path, number, 3) for number in range(3)]
    group = [Siblings(one) for one in places]
    for number, one in enumerate(group):

        async def answer(word: str, number: int = number) -> bytes:
            return f"{number} {word}".encode()

        one.answer("name", answer)
    async with running(*(one.run() for one in group)):
        for place in places:
            await listening(place, place.number)
        assert await group[1].ask("name", bytes, word="é\n") == ["0 é\n".encode(), "2 é\n".encode()]
        assert await group[1].ask("unknown", bytes) == []
        # Of another version.
        assert await group[1].ask("name", bytes, words=1) == []
        assert await group[0].ask("name", bytes, word="x") == [b"1 x", b"2 x"]
    assert await group[0].ask("name", bytes, word="x") == []


async def test_one_that_is_busy_has_its_last_answer_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sibling_processes, "ANSWER_S", 0.05)
    asking, answering = (Siblings(Place(tmp_path, number, 2)) for number in range(2))
    free = asyncio.Event()
    free.set()

    async def answer(word: str) -> bytes:
        await free.wait()
        return word.encode()

    answering.answer("name", answer)
    async with running(answering.run()):
        await listening(Place(tmp_path, 0, 2), 1)
        async with asyncio.timeout(20):
            # Until it answers in this short time.
            while await asking.ask("name", bytes, word="x") != [b"x"]:
                await asyncio.sleep(0)
        free.clear()
        assert await asking.ask("name", bytes, word="x") == [b"x"]
        assert await asking.ask("name", bytes, word="y") == [], "another question"
        monkeypatch.setattr(sibling_processes, "LAST_ANSWER_S", 0.0)
        assert await asking.ask("name", bytes, word="x") == []
        monkeypatch.undo()
        free.set()
        assert await asking.ask("name", bytes, word="x") == [b"x"]
    # It has ended.
    assert await asking.ask("name", bytes, word="x") == []


async def test_answers_that_are_too_long_or_not_understood_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sibling_processes, "MAX_ANSWER", 1000)
    asking, answering = (Siblings(Place(tmp_path, number, 2)) for number in range(2))

    async def answer(size: int) -> bytes:
        return b"1" * size

    answering.answer("name", answer)
    async with running(answering.run()):
        await listening(Place(tmp_path, 0, 2), 1)
        assert await asking.ask("name", len, size=1000) == [1000]
        assert await asking.ask("name", len, size=1001) == []
        for _ in range(2):
            assert await asking.ask("name", Traffic.from_json, size=9) == []
        assert await asking.ask("name", int, size=3) == [111]


async def test_a_router_of_one_process_has_none() -> None:
    alone = Siblings()
    alone.answer("name", echo)
    await alone.run()
    assert alone.number is None
    assert await alone.ask("name", bytes) == []


@pytest.mark.parametrize("said", [b"", b"9\nhalf", b"-1\n", b"x\n", b"9" * 5000 + b"\n", None])
@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.sweep(3)
async def test_one_that_does_not_answer_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes | None, hangs: bool
) -> None:
    """It hangs or ends at once or in the middle, says something else, or breaks the connection."""
    # The other one must answer in time on a busy machine.
    monkeypatch.setattr(sibling_processes, "ANSWER_S", 3.0 if hangs else 30.0)
    places = [Place(tmp_path, number, 3) for number in range(3)]
    asking, answering = Siblings(places[0]), Siblings(places[2])
    answering.answer("name", echo)
    asked: list[asyncio.StreamWriter] = []

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(writer)
        if said is None:
            writer.transport.abort()
        else:
            writer.write(said)
            if not hangs:
                writer.close()

    server = await asyncio.start_unix_server(other, places[0].socket(1))
    async with running(answering.run()), server:
        await listening(places[0], 2)
        assert await asking.ask("name", bytes) == [b"{}"]
        assert len(asked) == 1
        for one in asked:
            one.transport.abort()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\n",
        b"[1]\n",
        b"{}\n",
        b'["name"]\n',
        b"[[], {}]\n",
        b"[" * 30_000 + b"\n",
        b"\xff\n",
        b"x" * 2**17,
    ],
)
async def test_any_bytes_leave_it_answering(tmp_path: Path, sent: bytes) -> None:
    places = [Place(tmp_path, number, 2) for number in range(2)]
    asking, answering = (Siblings(one) for one in places)
    answering.answer("name", echo)
    async with running(answering.run()):
        await listening(places[0], 1)
        reader, writer = await asyncio.open_unix_connection(places[0].socket(1))
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() in (b"", b"0\n")
        writer.close()
        assert await asking.ask("name", bytes, a=1) == [b"{'a': 1}"]


@pytest.mark.parametrize("text", ["", ":", "x", "{}:2", "{}:-1", "{}:x", "/nowhere:0"])
def test_a_bad_place(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="--sibling is "):
        Place.parse(text.format(tmp_path), 2)
    assert Place.parse(f"{tmp_path}:1", 2).others == (f"{tmp_path}/0.sock",)
