"""A YAML file read as plain data, with the line of every key. Only what JSON could say is
accepted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvrelay.errors import ConfigError

MAX_BYTES = 2**20
_MAX_DEPTH = 16
_NOT_UNICODE = "an escape that stands for no character"

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class YamlFile:
    name: str  # as the user gave it; empty for no file
    data: dict[str, Any]
    lines: dict[KeyPath, int]  # from 1

    @classmethod
    def empty(cls) -> YamlFile:
        return cls("", {}, {})

    @classmethod
    def read(cls, path: Path) -> YamlFile:
        """A file without content is an empty mapping. Raises ConfigError."""
        text = _text(path)
        lines: dict[KeyPath, int] = {}
        try:
            data = _Loader(text).document(lines)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark is not None else 1
            problem = ", ".join(part for part in (error.context, error.problem) if part)
            raise ConfigError(f"{path}:{line}: {problem[:300]}") from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise ConfigError(
                f"{path}:{line}: character {chr(error.character)!a} is not allowed in YAML"
            ) from None
        return cls(str(path), data, lines)

    def line(self, loc: KeyPath) -> int:
        """Line of the key, or of the nearest mapping around it when the file lacks it; 1 when it
        has neither.
        """
        for length in range(len(loc), 0, -1):
            if loc[:length] in self.lines:
                return self.lines[loc[:length]]
        return 1

    def where(self, loc: KeyPath) -> str:
        return f"{self.name}:{self.line(loc)}" if self.name else ""


def key_text(loc: KeyPath) -> str:
    """prefill.metrics[0].target"""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{_printable(part)}" for part in loc
    ).lstrip(".")


def _printable(key: str) -> str:
    return key[:60] if key.isprintable() else repr(key[:60])


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}:1: larger than {MAX_BYTES} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: byte 0x{raw[error.start]:02x} is not UTF-8") from None


class _Loader(yaml.SafeLoader):
    """Numbers are decimal (YAML 1.1 would read 010 as 8 and 1:30 as 90), and there are no dates and
    no merge keys.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own form

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def document(self, lines: dict[KeyPath, int]) -> dict[str, Any]:
        """The file's mapping. Raises yaml.MarkedYAMLError."""
        try:
            node = self.get_single_node()
        except (ValueError, OverflowError):  # PyYAML's own on an escape such as "\U00110000"
            raise yaml.MarkedYAMLError(problem=_NOT_UNICODE, problem_mark=self.get_mark()) from None
        if node is None or (data := self._plain(node, (), lines)) is None:
            return {}
        if not isinstance(data, dict):
            raise yaml.MarkedYAMLError(
                problem="must be a mapping of keys to values", problem_mark=node.start_mark
            )
        return data

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise yaml.MarkedYAMLError(
                problem="anchors and aliases are not allowed", problem_mark=event.start_mark
            )
        if event.tag is not None:
            problem = f"tag {event.tag!r}: tags are not allowed"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        if self._depth == _MAX_DEPTH:
            problem = f"nested deeper than {_MAX_DEPTH} levels"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def _plain(self, node: yaml.Node, loc: KeyPath, lines: dict[KeyPath, int]) -> Any:
        """str, int, float, bool, None, and lists and dicts of them; enters the line of each
        location into `lines`.
        """
        lines.setdefault(loc, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            return [
                self._plain(item, (*loc, index), lines) for index, item in enumerate(node.value)
            ]
        if isinstance(node, yaml.ScalarNode):
            self._check_text(node)
            if not node.value.isprintable():  # no name, path, address or number has any
                problem = "a line break or control character in a value"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
            return self.construct_object(node)
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(
                    problem="a key must be a word", problem_mark=key.start_mark
                )
            self._check_text(key)
            here = (*loc, key.value)
            if key.value in mapping:
                problem = f"{key_text(here)}: repeated key; first on line {lines[here]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[here] = key.start_mark.line + 1
            mapping[key.value] = self._plain(value, here, lines)
        return mapping

    def _check_text(self, node: yaml.ScalarNode) -> None:
        if any("\ud800" <= char <= "\udfff" for char in node.value):  # half of a surrogate pair
            raise yaml.MarkedYAMLError(problem=_NOT_UNICODE, problem_mark=node.start_mark)


_RESOLVERS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (
        "bool",
        r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF",
        list("yYnNtTfFoO"),
    ),
    ("int", r"[-+]?(?:0|[1-9][0-9]{0,17})", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)
for _kind, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), _first
    )
