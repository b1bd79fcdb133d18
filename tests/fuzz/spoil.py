"""Ways to spoil what was good: trees of values, texts, bytes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from typing import Any

Tree = Any  # of dicts, lists, texts, numbers, booleans, None

NUMBERS = (
    *(
        -1,
        0,
        1,
        2,
        127,
        255,
        2**16,
        2**31 - 1,
        2**31,
        -(2**31) - 1,
        2**32,
        2**53,
        2**63 - 1,
        2**63,
        -(2**63) - 1,
        2**64,
    ),
    # Beyond a float.
    *(10**400, -(10**400)),
    *(10**30, 0.5, -0.0, 5e-324, 1e308, -1e308, math.nan, math.inf, -math.inf),
)
# Those that a float holds.
FLOATS = tuple(one for one in NUMBERS if isinstance(one, float) or abs(one) < 10**300)
TEXTS = (
    *(
        "",
        " ",
        "x",
        "0",
        "-1",
        "1e999",
        "nan",
        "off",
        "null",
        "None",
        "true",
        "\0",
        "\r\n",
        "a\r\nb: c",
        "\x1b[2J\x07",
    ),
    *(
        "\ud800",
        "\U0010ffff",
        "ж" * 300,
        "x" * 10_000,
        "../../../etc/passwd",
        "/dev/zero",
        "{{ 7 * 7 }}",
        "%s%n",
        "'",
    ),
    *(
        "!!python/object/apply:os.system [id]",
        "&a",
        "*a",
        "<<",
        "\u202e",
        "a" * 129,
        "__class__",
        "127.0.0.1:1",
    ),
)
_ODD_BYTES = (
    b"\0",
    b"\xff",
    b"\xff\xfe",
    b"\x80",
    b"\r\n",
    b"\x1b[2J",
    b"\xed\xa0\x80",
    b"\xff" * 10,
    b"\x7f" * 9,
)


def value(draw: random.Random, depth: int = 2) -> Tree:
    """Some value that nobody would expect."""
    match draw.randrange(8) if depth else draw.randrange(5):
        case 0 | 1:
            return draw.choice(NUMBERS)
        case 2 | 3:
            return draw.choice(TEXTS)
        case 4:
            return draw.choice([None, True, False])
        case 5:
            return [value(draw, depth - 1) for _ in range(draw.choice([0, 0, 1, 2, 100]))]
        case 6:
            return {
                draw.choice(TEXTS): value(draw, depth - 1) for _ in range(draw.choice([0, 1, 3]))
            }
        case _:
            return nested(draw.choice([20, 200, 900]), draw.random() < 0.5)


def nested(depth: int, lists: bool) -> Tree:
    tree: Tree = 1
    for _ in range(depth):
        tree = [tree] if lists else {"a": tree}
    return tree


def spoiled(draw: random.Random, tree: Tree, words: Sequence[str] = ()) -> Tree:
    """A copy with some places changed. `words` are keys and texts that mean something to who reads
    it.
    """
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3, 6])):
        tree = _changed(draw, tree, words)
    return tree


def _changed(draw: random.Random, tree: Tree, words: Sequence[str]) -> Tree:
    """With one change somewhere below, or here."""
    if isinstance(tree, dict) and tree and draw.random() < 0.85:
        copy = dict(tree)
        key = draw.choice(list(copy))
        match draw.randrange(8):
            case 0:
                del copy[key]
            case 1:
                copy[draw.choice([*TEXTS, *words])] = (
                    value(draw) if draw.random() < 0.7 else copy[key]
                )
            case 2:
                copy[draw.choice(list(copy))] = copy[key]
            case _:
                copy[key] = _changed(draw, copy[key], words)
        return copy
    if isinstance(tree, list) and tree and draw.random() < 0.85:
        items = list(tree)
        at = draw.randrange(len(items))
        match draw.randrange(8):
            case 0:
                del items[at]
            case 1:
                items.insert(at, value(draw))
            case 2:
                items = items * draw.choice([2, 30]) if len(items) < 100 else items[:at]
            case _:
                items[at] = _changed(draw, items[at], words)
        return items
    if isinstance(tree, str) and draw.random() < 0.5:
        return text(draw, tree, words)
    if isinstance(tree, int | float) and not isinstance(tree, bool) and draw.random() < 0.5:
        return draw.choice([tree + 1, tree - 1, -tree, tree * 1000, tree // 3, str(tree), *NUMBERS])
    return draw.choice(words) if words and draw.random() < 0.2 else value(draw)


def text(draw: random.Random, good: str, words: Sequence[str] = ()) -> str:
    """With pieces cut, doubled, moved or put in."""
    for _ in range(draw.choice([1, 1, 2, 4])):
        at, end = sorted((draw.randint(0, len(good)), draw.randint(0, len(good))))
        match draw.randrange(5):
            case 0:
                good = good[:at] + good[end:]
            case 1 if end - at < 2000:
                good = good[:end] + good[at:end] * draw.choice([1, 3]) + good[end:]
            case 2:
                good = good[:at] + draw.choice([*words, *TEXTS]) + good[at:]
            case 3:
                good = good[:at] + str(draw.choice(NUMBERS)) + good[end:]
            case _:
                good = (
                    good[:at]
                    + chr(draw.choice([draw.randrange(128), draw.randrange(0xD7FF)]))
                    + good[at + 1 :]
                )
    return good


def json_bytes(draw: random.Random, tree: Tree) -> bytes:
    """As JSON, or nearly: with keys twice, NaN, a bottomless pit, odd bytes."""
    found = json.dumps(tree, ensure_ascii=draw.random() < 0.7)
    if draw.random() < 0.1:
        at = found.find("{") + 1
        found = (
            found[:at]
            + '"model": 1, "model": 2, "a": 1, "a": 1'
            + ("," if found[at : at + 1] == '"' else "")
            + found[at:]
        )
    if draw.random() < 0.05:
        depth = draw.choice([500, 5000, 100_000])
        found = found.replace(
            "1", draw.choice(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth]), 1
        )
    data = found.encode(errors="surrogatepass")
    return garbled(draw, data) if draw.random() < 0.25 else data


def garbled(draw: random.Random, good: bytes) -> bytes:
    """With some bytes changed, cut, doubled or put in."""
    data = bytearray(good)
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randint(0, len(data))
        end = at + draw.choice([1, 2, 8, 1000])
        match draw.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                data[at:at] = draw.choice(_ODD_BYTES)
            case 2:
                data[at:at] = data[at:end]
            case 3:
                del data[at:end]
            case 4:
                data[at : at + 1] = draw.randbytes(1)
            case _:
                del data[at:]
    return bytes(data)
