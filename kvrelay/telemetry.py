"""Structured logs on stderr: key=value lines for people, one JSON object a line for machines.

Logged are names, numbers and reasons; never prompts, tokens or credentials.
"""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logging(level: str = "info") -> None:
    """Sets the process-wide log format and threshold (`debug`, `info`, `warning`, `error`)."""
    to_person = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"], drop_missing=True)
        if to_person
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if to_person else "iso", utc=not to_person),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger whose lines carry `component=name`."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=name)
    return logger
