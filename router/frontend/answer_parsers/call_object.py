"""Reads a call that is a JSON object: `{"name": ..., "arguments": {...}}`."""

from __future__ import annotations

import json
from collections.abc import Callable

from router.frontend.answer_parsers.stepped_parser import SteppedParser
from router.frontend.answer_parsers.text_reader import Steps

_ARGUMENTS = ("arguments", "parameters")
_BARE_KEYS = ("name", *_ARGUMENTS, "id", "type")


class CallObject:
    """Reads one call object for a parser. The members may come in any order; members with other
    keys are ignored.

    A call is announced when its name is known.

    If `bare`, nothing but the object itself shows that it is a call. Then the call is announced
    when its name is known and its arguments have begun. The arguments must be an object, the keys
    must be those of a call, and the name must be in `names` unless `names` is empty.
    """

    def __init__(
        self, parser: SteppedParser, bare: bool = False, names: frozenset[str] = frozenset()
    ) -> None:
        self._parser = parser
        self._reader = parser.reader
        self._bare = bare
        self._names = names
        self._name = ""
        self._announced = False
        self._has_arguments = False
        # Arguments that wait for the name.
        self._held = ""

    def read(self) -> Steps[bool]:
        """Reads the object after its opening brace. Returns False if it is not a call.

        If the JSON breaks after the call was announced, returns True at that place, with the
        arguments that were read so far.
        """
        is_whole = yield from self._members()
        if is_whole and self._announced and not self._has_arguments:
            self._parser.add_arguments("{}")
        return self._announced

    def _members(self) -> Steps[bool]:
        """Reads members up to the closing brace. Returns False if the object breaks before it."""
        while True:
            yield from self._reader.spaces()
            if (yield from self._reader.accept("}")):
                return True
            if not (yield from self._member()):
                return False
            yield from self._reader.spaces()
            if not (yield from self._reader.accept(",")):
                return bool((yield from self._reader.accept("}")))

    def _member(self) -> Steps[bool]:
        key = yield from self._string()
        yield from self._reader.spaces()
        if not key or not (yield from self._reader.accept(":")):
            return False
        if self._bare and not self._announced and key not in _BARE_KEYS:
            return False
        yield from self._reader.spaces()
        if key == "name" and not self._name:
            return (yield from self._read_name())
        if key in _ARGUMENTS and not self._has_arguments:
            return (yield from self._read_arguments())
        return bool((yield from self._reader.json_text()))

    def _read_name(self) -> Steps[bool]:
        name = yield from self._string()
        # JSON can escape control characters.
        if not name.isprintable() or (self._bare and self._names and name not in self._names):
            return False
        self._name = name
        if name and (self._has_arguments or not self._bare):
            self._announce()
            self._parser.add_arguments(self._held)
        return bool(name)

    def _read_arguments(self) -> Steps[bool]:
        self._has_arguments = True
        if self._name and (yield from self._reader.peek()) == "{":
            self._announce()
            yield from self._reader.json_value(self._parser.add_arguments)
            return True
        arguments = _decoded((yield from self._reader.json_text()))
        if self._bare and not arguments.startswith("{"):
            return False
        if self._name and arguments:
            self._announce()
            self._parser.add_arguments(arguments)
        else:
            self._held = arguments
        return bool(arguments)

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            self._parser.start_call(self._name)

    def _string(self) -> Steps[str]:
        """Returns a string's value, or "" if there is no string."""
        if (yield from self._reader.peek()) != '"':
            return ""
        text = yield from self._reader.json_text()
        return _string_value(text) or ""


def read_list(parser: SteppedParser, new_object: Callable[[], CallObject]) -> Steps[bool]:
    """Reads a list of calls after its opening bracket. Returns False if the first element is not a
    call. The list ends at a later element that is not a call.
    """
    reader = parser.reader
    is_call = False
    while True:
        yield from reader.spaces()
        if not (yield from reader.accept("{")):
            break
        read = new_object().read()
        if not (yield from (parser.attempt("{", read) if is_call else read)):
            return is_call
        is_call = True
        yield from reader.spaces()
        if not (yield from reader.accept(",")):
            break
    if is_call:
        yield from reader.accept("]")
    return is_call


def _decoded(arguments: str) -> str:
    """Returns the JSON text of arguments. Some models write the object as the text of a string, or
    write null for none.
    """
    if arguments == "null":
        return "{}"
    text = _string_value(arguments) if arguments.startswith('"') else None
    text = text.strip() if text else ""
    return text if text.startswith("{") else arguments


def _string_value(text: str) -> str | None:
    """Returns the value of a JSON string. Returns None if it is malformed or not Unicode."""
    try:
        value = str(json.loads(text, strict=False))
        value.encode()
    except ValueError:
        return None
    return value
