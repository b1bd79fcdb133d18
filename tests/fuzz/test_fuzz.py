"""A little of what `make fuzz` does for long: the same inputs each time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from fuzz.catalogue import NAMES, parser
from fuzz.parser import Finding, Parser, fuzz

COMMAND = [sys.executable, str(Path(__file__).with_name("run.py"))]
INPUTS = {
    "load": 2,
    "template": 20,
    "config": 60,
    "policy": 60,
    "tokens": 60,
    "folder": 80,
    "report": 80,
    "sse": 100,
}


@pytest.mark.parametrize("name", NAMES)
def test_every_input_is_taken_or_refused(name: str) -> None:
    found = fuzz(parser(name), range(1, 1 + INPUTS.get(name, 120)))
    assert len(found.outcomes) > 1 or name in ("load", "template"), (
        "some are taken, some are refused"
    )


def _crash(data: bytes) -> str:
    raise ZeroDivisionError


def _hoard(data: bytes) -> str:
    bytearray(b"x") * (200 * 2**20)  # which is gone at once; the peak tells
    return "taken"


@pytest.mark.parametrize(
    ("feed", "says"), [(_crash, "ZeroDivisionError"), (_hoard, "bytes of memory")]
)
def test_what_does_harm_is_found(feed: Callable[[bytes], str], says: str) -> None:
    @contextmanager
    def feeding(feed: Callable[[bytes], str]) -> Iterator[Callable[[bytes], str]]:
        yield feed

    with pytest.raises(Finding, match=rf"harmful, seed 7, 3 bytes: .*{says}"):
        fuzz(Parser("harmful", lambda draw: draw.randbytes(3), partial(feeding, feed)), [7])


@pytest.mark.parametrize("name", ["redis", "http"])
def test_the_command_runs_one_parser(name: str) -> None:
    done = subprocess.run(
        [*COMMAND, name, "--seconds", "0", "--seed", "3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, f"{name}: 1 inputs" in done.stdout) == (0, True), (
        done.stdout + done.stderr
    )


def test_the_command_names_the_parsers_that_there_are() -> None:
    unknown = subprocess.run([*COMMAND, "nothing"], capture_output=True, text=True, check=False)
    assert (unknown.returncode, "config, policy" in unknown.stderr) == (2, True)
