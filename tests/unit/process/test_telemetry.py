from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import structlog

from kvrelay.errors import InvalidArgument
from kvrelay.process.log_writer import LogWriter
from kvrelay.process.telemetry import configure_logging, flush_logs, get_logger


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_a_pipe_gets_one_json_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    get_logger("registry").warning("skipped", key="a\n\x1b[31mb")
    flush_logs()
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    record = json.loads(line)
    assert record.pop("timestamp").endswith("Z")
    assert record == {
        "level": "warning",
        "event": "skipped",
        "component": "registry",
        "key": "a\n\x1b[31mb",
    }


def test_a_process_that_forks_logs_without_a_thread(capsys: pytest.CaptureFixture[str]) -> None:
    threads = threading.active_count()
    configure_logging(at_once=True)
    get_logger("launch").warning("worker_killed", pid=7)
    assert threading.active_count() == threads
    record = json.loads(capsys.readouterr().err)
    assert (record["event"], record["pid"]) == ("worker_killed", 7)


def test_a_terminal_gets_key_value_pairs_without_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    configure_logging()
    get_logger("registry").warning("skipped", key="a\n\x1b[31mb")
    flush_logs()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert line.endswith(
        "level='warning' event='skipped' component='registry' key='a\\n\\x1b[31mb'"
    )


def test_lines_below_the_level_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("error")
    get_logger("registry").warning("skipped")
    flush_logs()
    assert capsys.readouterr().err == ""


def test_the_environment_sets_the_level(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_LOG_LEVEL", "DEBUG")
    configure_logging("error")
    get_logger("registry").debug("seen")
    flush_logs()
    assert json.loads(capsys.readouterr().err)["event"] == "seen"
    monkeypatch.setenv("KVRELAY_LOG_LEVEL", "loud")
    with pytest.raises(InvalidArgument, match="'loud'; allowed are debug, info, warning, error"):
        configure_logging()


def test_a_pipe_that_nobody_reads_stops_nobody_and_what_is_dropped_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    writer = LogWriter(max_lines=10)
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as said:
        monkeypatch.setattr("sys.stderr", stream)
        writer.info("x" * 2_000_000)  # more than a pipe holds
        assert said.read(1) == "x"
        for number in range(25):
            writer.info(str(number))
        said.readline()
        assert [said.readline() for _ in range(10)] == [f"{number}\n" for number in range(10)]
        assert json.loads(said.readline())["lines"] == 15
        writer.info("it flows again")
        assert said.readline() == "it flows again\n"
        writer.flush()


def test_a_stream_that_cannot_be_written_to_costs_lines_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = LogWriter()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stderr", full)
        writer.info("lost")
        writer.flush()
    monkeypatch.undo()
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as said:
        monkeypatch.setattr("sys.stderr", stream)
        writer.info("there")
        assert said.readline() == "there\n"
        assert json.loads(said.readline())["lines"] == 1
        writer.flush()


@pytest.mark.parametrize("read", [True, False], ids=["read", "not read"])
def test_a_process_ends_with_its_last_lines_or_without(read: bool) -> None:
    program = (
        "from kvrelay.process.telemetry import configure_logging, get_logger\n"
        "configure_logging()\n"
        "for number in range(3000): get_logger('a').info('line', number=number, filler='x' * 100)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process, process.stderr as stderr:
        if read:
            assert [json.loads(line)["number"] for line in stderr] == list(range(3000))
        assert process.wait(30) == 0


def test_a_process_that_is_forked_while_a_line_is_written_logs() -> None:
    """The fork copies the lock as it is at that moment."""
    code = """
import os, signal
from kvrelay.process.log_writer import LogWriter
for _ in range(40):
    writer = LogWriter()
    writer.info("parent")
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        writer.info("child")
        writer.flush(10)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    writer.flush(10)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True
    )
    lines = done.stderr.split()
    assert (lines.count("parent"), lines.count("child")) == (40, 40)
