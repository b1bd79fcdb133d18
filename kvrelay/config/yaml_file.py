"""Reads a YAML file as plain data, with the line of every key. Only data that JSON can represent is
accepted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvrelay.config.file_name import shown_name, why_unreadable
from kvrelay.config.special_file import is_special
from kvrelay.errors import ConfigError

MAX_BYTES = 2**20
_MAX_DEPTH = 16
_NOT_UNICODE = "an escape that stands for no character"

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class YamlFile:
    """The data of a YAML file, and the lines of its keys."""

    # The name that the user gave; empty if there is no file.
    name: str
    data: dict[str, Any]
    # Counted from 1.
    lines: dict[KeyPath, int]

    @classmethod
    def empty(cls) -> YamlFile:
        """Returns the data of an absent file: an empty mapping."""
        return cls("", {}, {})

    @classmethod
    def read(cls, path: Path, *, may_be_pipe: bool = False) -> YamlFile:
        """Reads a file. A file without content is an empty mapping. Raises ConfigError.

        may_be_pipe: a pipe is waited for, such as that of `-c <(command)`.
        """
        text = _text(path, may_be_pipe)
        lines: dict[KeyPath, int] = {}
        try:
            data = _Loader(text).document(lines)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark is not None else 1
            problem = ", ".join(part for part in (error.context, error.problem) if part)
            if r"'\t' that cannot start any token" in problem:
                problem = "a tab; YAML wants spaces before a key and after its colon"
            elif "mapping values are not allowed" in problem:
                problem = "a colon where YAML allows none; write one key: value a line, and quotes "
                problem += "around text with a colon"
            raise ConfigError(f"{path}:{line}: {problem[:300]}") from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise ConfigError(
                f"{path}:{line}: character {chr(error.character)!a} is not allowed in YAML"
            ) from None
        return cls(str(path), data, lines)

    def line(self, loc: KeyPath) -> int:
        """Returns the line of the key, or of the nearest enclosing mapping if the file lacks the
        key, or 1 if it has neither.
        """
        for length in range(len(loc), 0, -1):
            if loc[:length] in self.lines:
                return self.lines[loc[:length]]
        return 1

    def written(self, loc: KeyPath) -> KeyPath:
        """Returns the place of a value in the file. One of `models` may be that at the top."""
        match loc:
            case ("models", _, *rest) if loc not in self.lines and tuple(rest) in self.lines:
                return tuple(rest)
        return loc

    def where(self, loc: KeyPath) -> str:
        """Returns FILE:LINE of the key; empty if there is no file."""
        return f"{self.name}:{self.line(loc)}" if self.name else ""


def key_text(loc: KeyPath) -> str:
    """Formats a key path, for example prefill.metrics[0].target."""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{_printable(part)}"
        for part in loc
        # pydantic's word for the key itself.
        if part != "[key]"
    ).lstrip(".")


def _printable(key: str) -> str:
    return key[:60] if key.isprintable() else repr(key[:60])


def _text(path: Path, may_be_pipe: bool) -> str:
    try:
        if path.is_dir():
            # An empty name stands for the current folder.
            raise ConfigError(f"{path}: is a folder; give the name of a YAML file")
        if is_special(path) and not may_be_pipe:
            raise ConfigError(f"{path}: is not a regular file; give the name of a YAML file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shown_name(path)}: cannot be read: {why_unreadable(error)}") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}:1: the file is larger than {MAX_BYTES} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: byte 0x{raw[error.start]:02x} is not valid UTF-8"
        ) from None


class _Loader(yaml.SafeLoader):
    """A YAML loader without dates and merge keys. Numbers are decimal: YAML 1.1 would read 010 as 8
    and 1:30 as 90.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own form

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def document(self, lines: dict[KeyPath, int]) -> dict[str, Any]:
        """Returns the mapping of the file. Raises yaml.MarkedYAMLError."""
        try:
            node = self.get_single_node()
        except (ValueError, OverflowError):
            # PyYAML raises these for an escape that stands for no character, for example
            # "\U00110000".
            raise yaml.MarkedYAMLError(problem=_NOT_UNICODE, problem_mark=self.get_mark()) from None
        if node is None or (data := self._plain(node, (), lines)) is None:
            return {}
        if not isinstance(data, dict):
            raise yaml.MarkedYAMLError(
                problem="must be a mapping of keys to values", problem_mark=node.start_mark
            )
        return data

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Composes a node. Raises yaml.MarkedYAMLError for anchors, aliases, tags, and nesting
        deeper than the limit.
        """
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
        """Converts a node to str, int, float, bool or None, or to lists and dicts of them. Records
        the line of each location in `lines`.
        """
        lines.setdefault(loc, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            return [
                self._plain(item, (*loc, index), lines) for index, item in enumerate(node.value)
            ]
        if isinstance(node, yaml.ScalarNode):
            self._check_text(node)
            # Names, paths, addresses and numbers contain only printable characters.
            if not node.value.isprintable():
                problem = "a line break or control character in a value"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
            return self.construct_object(node)
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(
                    problem="a key must be a plain string", problem_mark=key.start_mark
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
        # Half of a surrogate pair.
        if any("\ud800" <= char <= "\udfff" for char in node.value):
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
