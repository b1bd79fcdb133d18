"""Everything that reads what comes from outside, by name. KV frames have a fuzzer of their own,
with real pushes: tests/unit/kv_transfer/fuzz_frames.py."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from fuzz.parser import Parser

_MODULES = {
    "of_files": ("config", "policy", "tokens", "redis"),
    "of_http": ("http",),
    "of_messages": ("generate", "admin", "answers"),
    "of_sessions": ("events", "commands"),
    "of_models": ("folder", "load", "template"),
    "of_loadtest": ("trace", "report", "sse"),
}
NAMES = tuple(name for names in _MODULES.values() for name in names)


def parser(name: str) -> Parser:
    """Imports what it needs, and for most that is not torch."""
    (module,) = (one for one, names in _MODULES.items() if name in names)
    parsers: Iterable[Parser] = import_module(f"fuzz.{module}").PARSERS
    return next(one for one in parsers if one.name == name)
