from __future__ import annotations

import sys
from pathlib import Path

import case_server
import pytest
from client_list import CLIENTS
from client_process import client_process

from kvrelay.errors import DeadlineExceeded, Unavailable

SCRIPT = """
import os, sys, time
sys.path.insert(0, {folder!r})
from case_server import serve_cases

def said(server):
    print("noise", flush=True)
    return [server.openai, server.model]

def wrong(server):
    raise ValueError("no week")

serve_cases({{
    "said": said,
    "wrong": wrong,
    "slow": lambda server: time.sleep(60),
    "dies": lambda server: os._exit(3),
}})
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "an_app.py"
    path.write_text(SCRIPT.format(folder=str(Path(case_server.__file__).parent)))
    return path


async def test_cases(script: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with client_process(Path(sys.executable), script, "http://h:1", "m", log) as client:
        assert await client.cases() == ["said", "wrong", "slow", "dies"]
        said = await client.run("said", 60)
        assert (said.answer, said.error) == (["http://h:1/v1", "m"], "")
        assert (await client.run("wrong", 60)).error.endswith("ValueError: no week\n")
        assert "KeyError" in (await client.run("absent", 60)).error
        with pytest.raises(Unavailable):
            await client.run("dies", 60)
    assert "noise" in log.read_text()


async def test_a_case_that_takes_too_long(script: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with client_process(Path(sys.executable), script, "u", "m", log) as client:
        await client.cases()
        with pytest.raises(DeadlineExceeded, match="slow did not end"):
            await client.run("slow", 0.01)


def test_each_script_exists_and_each_version_is_pinned() -> None:
    for library in CLIENTS.values():
        assert library.path.is_file()
        assert all("==" in one for call in library.requirements for one in call)
