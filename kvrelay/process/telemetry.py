"""Structured logs on stderr: key=value lines on a terminal, one JSON object per line otherwise.

Logs contain names, numbers and reasons; never prompts, tokens or credentials.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path

import structlog

from kvrelay.errors import InvalidArgument
from kvrelay.process.log_writer import DirectLogWriter, LogWriter

LEVELS = ("debug", "info", "warning", "error")
# An environment variable, so that the processes of a cluster inherit it.
LEVEL_VARIABLE = "KVRELAY_LOG_LEVEL"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_WRITER = LogWriter()


def configure_logging(default: str = "info", at_once: bool = False) -> None:
    """Sets the process-wide log format, and the threshold: KVRELAY_LOG_LEVEL, or else `default`.
    `at_once`: lines are written by the thread that logs, for a process that must have no other.

    Raises InvalidArgument for a level that is not in LEVELS.
    """
    level = (os.environ.get(LEVEL_VARIABLE) or default).lower()
    if level not in LEVELS:
        raise InvalidArgument(
            f"{LEVEL_VARIABLE} is {level!r}; allowed are {', '.join(LEVELS)}", field="log_level"
        )
    to_person = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.processors.KeyValueRenderer(
            key_order=["timestamp", "level", "event"], drop_missing=True
        )
        if to_person
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(
                fmt="%H:%M:%S" if to_person else "iso", utc=not to_person
            ),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=lambda *_: DirectLogWriter() if at_once else _WRITER,
        cache_logger_on_first_use=False,
    )


def name_process(**names: object) -> None:
    """Adds fields to all log lines of this thread, and of the tasks that it starts from now on."""
    structlog.contextvars.bind_contextvars(**names)


def log_to_file(path: Path) -> None:
    """Writes the log of this process to the end of a file, as JSON lines."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(path.open("a", encoding="utf-8", buffering=1)),
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """Returns a logger whose lines carry `component=name`."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=name)
    return logger


def flush_logs() -> None:
    """Waits until all log lines are written, for at most one second. A process that exits normally
    does this by itself.
    """
    _WRITER.flush()


def trace_id(traceparent: str) -> str | None:
    """Returns the trace id of a W3C `traceparent`; None if it is missing or invalid."""
    match = _TRACEPARENT.fullmatch(traceparent)
    return match[1] if match and int(match[1], 16) else None
