"""JSON parser in small steps. Its cost is linear in the size of the body, and it can be stopped
after each step. Pure.

`json.loads` holds the interpreter lock from the first byte to the last. So it stops every stream of
the router, even from another thread. This parser passes strings and runs of integers to C code in
bounded pieces.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Generator
from json import decoder as json_decoder
from math import isinf
from typing import Any

from kvrelay.errors import InvalidArgument

MAX_DEPTH = 64
# Limit on integers in lists. A body of 4 MiB holds up to 4/3 as many token ids of five digits.
MAX_INTEGERS = 2**19
# Limit on values of other kinds. 4096 messages of several parts have fewer.
MAX_VALUES = 2**16
MAX_NUMBER = 128  # characters
# Cost of a value, in characters of equal parsing cost.
VALUE_COST = 64

_DECODED = 2**16  # bytes in one step
_RUN = 1024  # integers in one step
_PIECE = 2**14  # characters of a string in one step
_CHECK_EVERY = 32  # values between two yields

_SPACE = re.compile(r"[ \t\n\r]{0,65536}")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*+))(\.[0-9]++)?([eE][-+]?[0-9]++)?")
# No group is repeated possessively: before Python 3.11.5, such a group with alternatives matches
# too much (python/cpython#106052).
_INTEGER = r"[ \t\n\r]{0,16}+-?(?:0|[1-9][0-9]{0,18}+)[ \t\n\r]{0,16}+,"
_INTEGERS = re.compile(rf"(?:{_INTEGER}){{1,{_RUN}}}")
_PLAIN_STRING = re.compile(rf'"([^"\\\x00-\x1f]{{0,{_PIECE}}}+)"')
# A match never splits a surrogate pair, because its halves encode one character.
_ESCAPE = (
    r'\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|["\\/bfnrt])'
)
_STRING_PIECE = re.compile(rf'(?:[^"\\\x00-\x1f]{{1,1024}}+|{_ESCAPE}){{0,64}}')
# The parser has joined all pairs.
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_LITERALS = {"t": ("true", True), "f": ("false", False), "n": ("null", None)}

_unescaped = json_decoder.scanstring  # type: ignore[attr-defined]  # the stubs lack it

Steps = Generator[int, None, Any]


def json_steps(body: deque[bytes]) -> Steps:
    """Parses a body given in parts. Takes each part from the deque, so that its memory is freed.

    Yields the parsing cost since the last yield, in characters; a step costs a few ten thousand at
    most. Returns the value. Raises InvalidArgument if the body is not one JSON value in UTF-8 with
    distinct keys, or is over the bounds above.
    """
    decoder, parts = getincrementaldecoder("utf-8")(), []
    try:
        while body:
            part = memoryview(body.popleft())
            for start in range(0, len(part), _DECODED):
                parts.append(decoder.decode(part[start : start + _DECODED]))
                if body or len(part) > _DECODED:
                    yield VALUE_COST + min(len(part), _DECODED) // 16
        parts.append(decoder.decode(b"", final=True))
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"the body is not valid JSON: it is not UTF-8: {error.reason}"
        ) from None
    text = "".join(parts)
    parts.clear()
    return (yield from _Parser(text).value())


def object_steps(body: deque[bytes]) -> Generator[int, None, dict[str, Any]]:
    """Parses a body in the steps of `json_steps`. Raises InvalidArgument if the body is not one
    JSON object with distinct keys and finite numbers.
    """
    value = yield from json_steps(body)
    if not isinstance(value, dict):
        raise InvalidArgument("the body is not a JSON object")
    return value


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._integers = 0
        self._values = 0
        # Characters in short strings and spaces since the last yield.
        self._read = 0

    def value(self) -> Steps:
        """Parses the text's single value."""
        text = self._text
        stack: list[Any] = []
        # For each object on the stack, the key of the value in progress.
        names: list[str] = []
        counted = 0
        while True:
            yield from self._space()
            self._values += 1
            if self._values - counted >= _CHECK_EVERY:
                self._check_counts()
                yield self._read + (self._values - counted) * VALUE_COST
                counted, self._read = self._values, 0
            first = text[self._at : self._at + 1]
            value: Any
            if first == '"':
                value = yield from self._string()
            elif first == "{":
                self._at += 1
                self._check_depth(stack)
                yield from self._space()
                if text[self._at : self._at + 1] != "}":
                    stack.append({})
                    names.append((yield from self._name(stack[-1])))
                    continue
                self._at += 1
                value = {}
            elif first == "[":
                self._at += 1
                self._check_depth(stack)
                items: list[Any] = []
                yield from self._run(items)
                if items or not (yield from self._closes("]")):
                    stack.append(items)
                    continue
                value = items
            else:
                value = self._scalar(first)
            # The value is complete. It may also complete the lists and objects that contain it.
            while stack:
                top = stack[-1]
                yield from self._space()
                mark = text[self._at : self._at + 1]
                if isinstance(top, list):
                    top.append(value)
                    if mark == ",":
                        self._at += 1
                        yield from self._run(top)
                        break
                    if mark != "]":
                        raise self._wrong("a comma or ]")
                else:
                    top[names[-1]] = value
                    if mark == ",":
                        self._at += 1
                        yield from self._space()
                        names[-1] = yield from self._name(top)
                        break
                    if mark != "}":
                        raise self._wrong("a comma or }")
                    names.pop()
                self._at += 1
                value = stack.pop()
            else:
                yield from self._space()
                if self._at < len(text):
                    raise self._wrong("the end")
                self._check_counts()
                yield self._read + (self._values - counted) * VALUE_COST
                return value

    def _space(self) -> Steps:
        if self._text[self._at : self._at + 1] in (" ", "\n", "\r", "\t"):
            before = -1
            while self._at != before:
                before = self._at
                # The pattern also matches the empty string, so the match is never None.
                self._at = _SPACE.match(self._text, before).end()  # type: ignore[union-attr]
                self._read += self._at - before
                if self._at - before >= 2**16:
                    yield self._read // 4
                    self._read = 0
        return None

    def _closes(self, mark: str) -> Generator[int, None, bool]:
        yield from self._space()
        if self._text[self._at : self._at + 1] != mark:
            return False
        self._at += 1
        return True

    def _name(self, of: dict[str, Any]) -> Generator[int, None, str]:
        if self._text[self._at : self._at + 1] != '"':
            raise self._wrong("a key in quotes")
        name: str = yield from self._string()
        if name in of:
            raise InvalidArgument(f"the body is not valid JSON: the key {name[:60]!r} is repeated")
        if _LONE_SURROGATE.search(name):
            raise InvalidArgument(
                f"the body is not valid JSON: the key {name[:60]!r} has half of a surrogate pair"
            )
        yield from self._space()
        if self._text[self._at : self._at + 1] != ":":
            raise self._wrong("a colon")
        self._at += 1
        return name

    def _string(self) -> Generator[int, None, str]:
        """Parses the string in quotes that begins here."""
        plain = _PLAIN_STRING.match(self._text, self._at)
        if plain is not None:
            self._at = plain.end()
            self._read += len(plain[1])
            return plain[1]
        at, parts = self._at + 1, []
        while True:
            # The pattern also matches the empty string, so the match is never None.
            end = _STRING_PIECE.match(self._text, at).end()  # type: ignore[union-attr]
            if end > at:
                # In this piece a backslash always begins a complete escape.
                parts.append(_unescaped(self._text[at:end] + '"', 0)[0])
                yield end - at
                at = end
                continue
            if self._text[at : at + 1] != '"':
                self._at = at
                raise self._wrong("more of a string, without control characters,")
            self._at = at + 1
            return "".join(parts)

    def _run(self, items: list[Any]) -> Steps:
        """Reads integers that are followed by a comma."""
        while (run := _INTEGERS.match(self._text, self._at)) is not None:
            items.extend(map(int, run[0][:-1].split(",")))
            self._integers += run[0].count(",")
            self._check_counts()
            self._at = run.end()
            yield 4 * len(run[0])
        return None

    def _scalar(self, first: str) -> Any:
        literal, value = _LITERALS.get(first, ("", None))
        if literal:
            if not self._text.startswith(literal, self._at):
                raise self._wrong("a value")
            self._at += len(literal)
            return value
        number = _NUMBER.match(self._text, self._at, self._at + MAX_NUMBER + 1)
        if number is None:
            raise self._wrong("a value")
        if len(number[0]) > MAX_NUMBER:
            raise InvalidArgument(
                f"the body is not valid JSON: the number at {self._at} has more than "
                f"{MAX_NUMBER} characters"
            )
        self._at = number.end()
        whole, fraction, exponent = number.groups()
        if fraction is None and exponent is None:
            return int(whole)
        if isinf(found := float(number[0])):
            raise InvalidArgument(
                f"the body is not valid JSON: the number {number[0][:60]} is too large"
            )
        return found

    def _check_depth(self, stack: list[Any]) -> None:
        if len(stack) >= MAX_DEPTH:
            raise InvalidArgument(f"the body is nested too deeply; the limit is {MAX_DEPTH} levels")

    def _check_counts(self) -> None:
        if self._integers > MAX_INTEGERS or self._values > MAX_VALUES:
            raise InvalidArgument(
                f"the body has too many values; the limits are {MAX_INTEGERS} integers in "
                f"lists and {MAX_VALUES} other values"
            )

    def _wrong(self, expected: str) -> InvalidArgument:
        if not self._text:
            return InvalidArgument("the body is empty; send a JSON object")
        if self._text.startswith("\ufeff"):
            return InvalidArgument("the body begins with a byte order mark; send UTF-8 without it")
        return InvalidArgument(
            f"the body is not valid JSON: expected {expected} at character {self._at}"
        )
