"""A text that arrives in pieces, as a terminal shows it."""

from __future__ import annotations

import io
import itertools
import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from kvrelay.cli.views import typed_text
from kvrelay.cli.views.typed_text import TypedText

_CODE = re.compile(r"\x1b\[(\d*)([DK])")


def shown(text: str) -> list[str]:
    """The lines of a terminal, whose cursor moves left by cells. It wraps nothing: each line has to
    fit.
    """
    lines, cells = [""], list[str]()
    at = 0
    while at < len(text):
        if code := _CODE.match(text, at):
            if code[2] == "D":
                removed = 0
                while removed < int(code[1]):
                    removed += cell_len(cells.pop())
                assert removed == int(code[1]), "it stops within a character"
            at = code.end()
        else:
            if text[at] == "\n":
                lines.append("")
                cells = []
            else:
                cells.append(text[at])
            at += 1
        lines[-1] = "".join(cells)
    return lines


def cells_of(text: str) -> int:
    """The cells that a terminal takes for each character by itself."""
    return sum(map(cell_len, text))


def typed(pieces: list[str], width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(typed_text, "_usable_width", lambda file: width)
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    text = TypedText(out)
    for piece in pieces:
        text.add(piece)
    return shown(out.getvalue())


@given(
    st.lists(st.sampled_from(["a", "b", " ", " ", "\n", "日", "e\u0301", "."]), max_size=120),
    st.lists(st.integers(1, 9), max_size=60),
    st.integers(2, 30),
)
def test_words_stay_whole_and_nothing_is_lost(
    characters: list[str], cuts: list[int], width: int
) -> None:
    """Pieces may end within a word, and within a character that is combined of two."""
    whole = "".join(characters)
    ends = [0, *itertools.accumulate(cuts), len(whole)]
    pieces = [whole[start:end] for start, end in itertools.pairwise(sorted(ends))]
    whole = whole.lstrip(" ")
    with pytest.MonkeyPatch.context() as patch:
        lines = typed(pieces, width, patch)
    assert all(cells_of(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(whole.split())
    words = {word for line in lines for word in line.split()}
    for word in whole.split():
        # A longer one has to break.
        if cells_of(word) <= width:
            assert word in words
    # Lines of the text itself remain.
    assert len(lines) >= whole.count("\n") + 1


FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
FLAG = "\U0001f1e9\U0001f1ea"
THUMB = "\U0001f44d\U0001f3fd"


@given(
    st.lists(st.sampled_from(["a", " ", "\n", "日", "e\u0301", FAMILY, FLAG, THUMB]), max_size=60),
    st.integers(2, 9),
)
@example(["\n", " ", "日", FAMILY], 7)
def test_no_line_ends_within_an_emoji(characters: list[str], width: int) -> None:
    whole = "".join(characters)
    with pytest.MonkeyPatch.context() as patch:
        lines = typed(list(whole), width, patch)
    for emoji in (FAMILY, FLAG, THUMB, "e\u0301"):
        assert sum(line.count(emoji) for line in lines) == whole.count(emoji)
    for line in lines:
        # A family that is wider than the line has a line for itself.
        assert cells_of(line) <= width or line.strip() == FAMILY


def test_a_word_moves_to_the_next_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = ["  Ruby and Os", "car laug", "hed. Th", "e end"]
    assert typed(pieces, 12, monkeypatch) == ["Ruby and ", "Oscar ", "laughed. The", "end"]


@given(st.text(), st.integers(0, 30))
def test_a_text_does_not_control_the_terminal(text: str, width: int) -> None:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typed_text, "_usable_width", lambda file: width)
        patch.setattr(out, "isatty", lambda: True)
        TypedText(out).add(f"a{text}\x1b[2J\x1b]0;title\x07\x9b\u202eb")
    left = _CODE.sub("", out.getvalue())
    assert not [one for one in left if unicodedata.category(one) == "Cc" and one not in "\n\t"]
    assert "\u202e" not in left


def test_a_terminal_of_unknown_width_wraps_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert typed(["  a", "b" * 500], 0, monkeypatch) == ["a" + "b" * 500]


def test_a_file_gets_the_text_as_it_is() -> None:
    out = io.StringIO()
    text = TypedText(out)
    for piece in ("  a", "b" * 500):
        text.add(piece)
    assert out.getvalue() == "  a" + "b" * 500
