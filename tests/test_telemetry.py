from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import structlog

from kvrelay.errors import InvalidArgument
from kvrelay.telemetry import configure_logging, get_logger


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_a_pipe_gets_one_json_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    get_logger("registry").warning("skipped", key="a\n\x1b[31mb")
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    record = json.loads(line)
    assert record.pop("timestamp").endswith("Z")
    assert record == {"level": "warning", "event": "skipped", "component": "registry", "key": "a\n\x1b[31mb"}


def test_a_terminal_gets_key_value_pairs_without_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    configure_logging()
    get_logger("registry").warning("skipped", key="a\n\x1b[31mb")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert line.endswith("level='warning' event='skipped' component='registry' key='a\\n\\x1b[31mb'")


def test_lines_below_the_level_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("error")
    get_logger("registry").warning("skipped")
    assert capsys.readouterr().err == ""


def test_the_environment_sets_the_level(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_LOG_LEVEL", "DEBUG")
    configure_logging("error")
    get_logger("registry").debug("seen")
    assert json.loads(capsys.readouterr().err)["event"] == "seen"
    monkeypatch.setenv("KVRELAY_LOG_LEVEL", "loud")
    with pytest.raises(InvalidArgument, match="'loud'; allowed are debug, info, warning, error"):
        configure_logging()
