from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from kvrelay.errors import ModelRefused, NotFound
from kvrelay.models import resolve_model
from kvrelay.tokenizer.tokenizer import TextStream, Tokenizer, TokenOffsets

DEMO = Tokenizer.load(resolve_model("demo"))
REFERENCE = AutoTokenizer.from_pretrained(resolve_model("demo"))

# Without the names of special tokens, which are not shown.
texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60).filter(
    lambda text: not any(name in text for name in ("<pad>", "<s>", "</s>", "<|"))
)
token_ids = st.lists(st.integers(0, DEMO.max_id), max_size=40)
# Few letters, so that stop strings are met, overlap and nearly match.
narrow = st.text(alphabet="abé\n", max_size=40)
narrow_stops = st.lists(st.text(alphabet="abé\n", min_size=1, max_size=6), min_size=1, max_size=4)


def pieces(stream: TextStream, ids: list[int]) -> list[str]:
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


def sentencepiece_like() -> Tokenizer:
    """Words begin with a mark, the first one's space is stripped, unknown characters become byte
    tokens.
    """
    words = ["▁", "▁a", "▁the", "a", "t", "h", "e", "▁cat"]
    vocab = {
        token: id_
        for id_, token in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words])
    }
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


_LETTERS = tokenizers.pre_tokenizers.ByteLevel.alphabet()
# A byte-level vocabulary spells printable bytes as they are, and the others with letters from 256.
_PLAIN = [byte for byte in range(256) if chr(byte) in _LETTERS]
_BYTES = {chr(byte): byte for byte in _PLAIN} | {
    chr(256 + number): byte
    for number, byte in enumerate(byte for byte in range(256) if byte not in _PLAIN)
}
# Each byte is a token, so that most sequences split characters.
split_ids = st.lists(
    st.sampled_from([DEMO._backend.token_to_id(letter) for letter in _LETTERS])
    | st.sampled_from(
        [DEMO._backend.token_to_id(letter) for letter, byte in _BYTES.items() if byte >= 128]
    )
    | st.integers(0, DEMO.max_id),
    max_size=40,
) | texts.map(lambda text: DEMO.encode(text, add_special_tokens=False))


def byte_ids(data: bytes) -> list[int]:
    """One token for each byte."""
    letters = {byte: letter for letter, byte in _BYTES.items()}
    return [DEMO._backend.token_to_id(letters[byte]) for byte in data]


def _byte(byte: int) -> int:
    """The token of a byte in `sentencepiece_like`."""
    return 1 + byte


def reference_offsets(ids: list[int]) -> list[int]:
    """Of each token, the place in the decoded bytes of the character that has its first byte."""
    data, starts = b"", []
    for token_id in ids:
        starts.append(len(data))
        if token_id not in DEMO.special_ids:
            data += bytes(_BYTES[letter] for letter in DEMO.spell([token_id])[0])
    # The character of each byte. Invalid bytes that could begin a character are one character.
    characters: list[int] = []
    while (at := len(characters)) < len(data):
        width = max(
            one for one in range(1, 5) if len(data[at : at + one].decode(errors="replace")) == 1
        )
        characters += [characters[-1] + 1 if characters else 0] * width
    del characters[len(data) :]
    assert DEMO.decode(ids) == data.decode(errors="replace")
    return [characters[one] if one < len(data) else -1 for one in starts]


class TestTokenOffsets:
    @given(split_ids)
    @example(DEMO.encode("é日😀", add_special_tokens=False))
    def test_a_token_is_where_its_character_is_in_the_text(self, ids: list[int]) -> None:
        offsets = TokenOffsets(DEMO)
        for token_id, expected in zip(ids, reference_offsets(ids), strict=True):
            offset = offsets.push(token_id)
            if token_id not in DEMO.special_ids:
                assert offset == expected

    @given(
        st.text(alphabet="athe cé日😀", max_size=30), st.text(alphabet="athe cé日😀", max_size=30)
    )
    def test_a_token_with_a_text_of_its_own_is_found_there(self, prompt: str, text: str) -> None:
        for tokenizer in (DEMO, sentencepiece_like()):
            before, ids = tokenizer.encode(prompt), tokenizer.encode(prompt + text)
            if not before or ids[: len(before)] != before:
                continue
            shown = "".join(pieces(TextStream(tokenizer, prompt_ids=before), ids[len(before) :]))
            offsets = TokenOffsets(tokenizer, before)
            for token_id in ids[len(before) :]:
                offset, own = offsets.push(token_id), tokenizer.decode([token_id])
                if "\ufffd" not in own:
                    assert shown[offset:].lstrip(" ").startswith(own.lstrip(" "))

    @given(st.text(alphabet="aé日😀", max_size=30), st.integers(0, 100))
    @example("你", 0)
    @example("😀", 0)
    @example("😀" * 20, 66)
    def test_each_byte_of_a_character_is_where_the_character_is(self, text: str, cut: int) -> None:
        data = text.encode()
        places = [at for at, one in enumerate(text) for _ in one.encode()]
        ids = [*map(_byte, data)]
        offsets = TokenOffsets(sentencepiece_like(), ids[:cut])
        first = places[cut] if cut < len(places) else 0
        assert [offsets.push(one) for one in ids[cut:]] == [at - first for at in places[cut:]]

    @given(
        st.lists(st.integers(0, 255).map(_byte) | st.integers(257, 264), max_size=90),
        st.integers(0, 90),
    )
    @example([_byte(one) for one in "\ufffd你".encode()], 0)
    @example([_byte(one) for one in "\ufffdé".encode()], 1)
    def test_offsets_of_bytes_never_decrease(self, ids: list[int], cut: int) -> None:
        offsets = TokenOffsets(sentencepiece_like(), ids[:cut])
        found = [offsets.push(one) for one in ids[cut:]]
        assert found == sorted(found)


class TestTokenizer:
    @given(texts, st.booleans())
    def test_gives_the_ids_of_transformers(self, text: str, special: bool) -> None:
        assert DEMO.encode(text, special) == REFERENCE.encode(text, add_special_tokens=special)

    @given(token_ids, st.booleans())
    def test_decodes_as_transformers(self, ids: list[int], skip: bool) -> None:
        assert DEMO.decode(ids, skip) == REFERENCE.decode(ids, skip_special_tokens=skip)

    @given(texts)
    def test_any_text_survives(self, text: str) -> None:
        assert DEMO.decode(DEMO.encode(text, add_special_tokens=False), skip_special=False) == text

    def test_sizes_and_special_ids(self) -> None:
        assert DEMO.vocab_size == len(REFERENCE)
        assert DEMO.max_id == len(REFERENCE) - 1
        assert DEMO.special_ids == set(REFERENCE.all_special_ids)

    def test_truncation_and_padding_of_the_file_are_off(self, tmp_path: Path) -> None:
        backend = tokenizers.Tokenizer.from_file(
            str(Path(resolve_model("demo")) / "tokenizer.json")
        )
        backend.enable_truncation(4)
        backend.enable_padding(length=16)
        backend.save(str(tmp_path / "tokenizer.json"))
        text = "Once upon a time there was a cat."
        assert Tokenizer.load(tmp_path).encode(text) == DEMO.encode(text)
        assert Tokenizer.load(tmp_path).encode("Once") == DEMO.encode("Once")

    def test_a_folder_without_tokenizer_is_not_found(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match=r"tokenizer\.json does not exist.*send token_ids"):
            Tokenizer.load(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": 1}'])
    def test_a_broken_tokenizer_is_refused(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ModelRefused, match=r"tokenizer\.json is not a valid tokenizer"):
            Tokenizer.load(tmp_path)

    def test_torch_and_transformers_stay_out(self) -> None:
        code = (
            "import sys, kvrelay.tokenizer.tokenizer as t; sys.exit(bool({'torch', 'transformers'} "
            "& set(sys.modules)))"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


class TestTextStream:
    @given(token_ids)
    def test_pieces_add_up_to_the_text_of_any_ids(self, ids: list[int]) -> None:
        assert "".join(pieces(TextStream(DEMO), ids)) == DEMO.decode(ids)

    @given(texts)
    def test_no_piece_holds_half_a_character(self, text: str) -> None:
        ids = DEMO.encode(text, add_special_tokens=False)
        shown = ""
        stream = TextStream(DEMO)
        for token_id in ids:
            shown += stream.push(token_id)
            assert text.startswith(shown)

    @given(texts, texts)
    def test_a_prompt_is_context_and_is_not_shown(self, prompt: str, text: str) -> None:
        prompt_ids = DEMO.encode(prompt + "end")
        ids = DEMO.encode(text, add_special_tokens=False)
        assert "".join(pieces(TextStream(DEMO, prompt_ids=prompt_ids), ids)) == text

    @given(
        st.text(alphabet="athe \ufffdé日😀", max_size=12),
        st.text(alphabet="athe \ufffdé日😀", max_size=12),
    )
    def test_a_prompt_may_end_with_a_replacement_character(self, prompt: str, text: str) -> None:
        ids = DEMO.encode(text, add_special_tokens=False)
        for tail in ("\ufffd", "\ufffd\ufffd"):
            prompt_ids = DEMO.encode(prompt + tail)
            assert "".join(pieces(TextStream(DEMO, prompt_ids=prompt_ids), ids)) == text

    @given(st.text(alphabet="a\ufffdé日😀", max_size=6), st.integers(0, 24))
    def test_a_prompt_may_end_within_any_character(self, text: str, cut: int) -> None:
        data = text.encode()
        # Half of U+FFFD looks like U+FFFD.
        assume("\ufffd" not in text[len(data[:cut].decode(errors="ignore")) :][:1])
        for tokenizer, ids in ((DEMO, byte_ids(data)), (sentencepiece_like(), [*map(_byte, data)])):
            stream = TextStream(tokenizer, prompt_ids=ids[:cut])
            whole = len(data[:cut].decode(errors="ignore"))
            assert "".join(pieces(stream, ids[cut:])) == text[whole:]

    def test_a_prompt_may_end_within_a_character(self) -> None:
        ids = DEMO.encode("日本語", add_special_tokens=False)
        assert len(ids) == 9, "this test wants one token per byte"
        assert "".join(pieces(TextStream(DEMO, prompt_ids=ids[:4]), ids[4:])) == "本語"

    @given(
        st.text(alphabet="athe cé日😀", max_size=30), st.text(alphabet="athe cé日😀", max_size=30)
    )
    def test_tokenizers_that_need_context(self, prompt: str, text: str) -> None:
        tokenizer = sentencepiece_like()
        ids = tokenizer.encode(prompt + text)
        for cut in range(len(ids) + 1):
            before = tokenizer.decode(ids[:cut])
            if "\ufffd" in before:
                continue
            shown = "".join(pieces(TextStream(tokenizer, prompt_ids=ids[:cut]), ids[cut:]))
            assert before + shown == tokenizer.decode(ids)

    def test_invalid_bytes_are_not_held_for_ever(self) -> None:
        lone = next(i for i in range(DEMO.vocab_size) if DEMO.decode([i]) == "\ufffd")
        stream = TextStream(DEMO)
        shown = [stream.push(lone) for _ in range(500)]
        assert len("".join(shown)) > 400
        assert len("".join(shown) + stream.finish()) == 500

    def test_special_tokens_show_nothing_and_keep_the_context(self) -> None:
        tokenizer = sentencepiece_like()
        tokenizer._backend.add_special_tokens(["<end>"])
        (end,) = tokenizer.special_ids
        first, second = tokenizer.encode("cat")[:1], tokenizer._backend.token_to_id("▁cat")
        stream = TextStream(tokenizer, prompt_ids=first)
        assert [stream.push(i) for i in (*[end] * 200, second)] == [""] * 200 + [" cat"]

    @given(narrow, narrow_stops)
    def test_the_text_ends_before_the_stop_string_that_completes_first(
        self, text: str, stops: list[str]
    ) -> None:
        ids = DEMO.encode(text, add_special_tokens=False)
        stream = TextStream(DEMO, tuple(stops))
        shown = "".join(pieces(stream, ids))
        expected = text
        for end in range(
            len(text) + 1
        ):  # naive: the shortest beginning of the text that ends with a stop string
            met = [stop for stop in stops if text[:end].endswith(stop)]
            if met:
                expected = text[: end - max(map(len, met))]
                break
        assert stream.stopped == any(stop in text for stop in stops)
        assert shown == expected

    @given(narrow, narrow_stops, st.integers(0, 12))
    def test_a_stop_string_that_is_complete_before_min_tokens_is_text(
        self, text: str, stops: list[str], min_tokens: int
    ) -> None:
        ids = DEMO.encode(text, add_special_tokens=False)
        stream = TextStream(DEMO, tuple(stops), min_tokens=min_tokens)
        shown = "".join(pieces(stream, ids))
        # A character that is incomplete after min_tokens is of the tokens after them.
        early = len(DEMO.decode(ids[:min_tokens]).rstrip("\ufffd"))
        expected = text
        for end in range(early + 1, len(text) + 1):
            met = [stop for stop in stops if text[:end].endswith(stop)]
            if met:
                expected = text[: end - max(map(len, met))]
                break
        assert stream.stopped == (expected != text)
        assert shown == expected

    @given(narrow, narrow_stops)
    def test_what_is_shown_never_has_to_be_taken_back(self, text: str, stops: list[str]) -> None:
        ids = DEMO.encode(text, add_special_tokens=False)
        final = "".join(pieces(TextStream(DEMO, tuple(stops)), ids))
        stream, shown = TextStream(DEMO, tuple(stops)), ""
        for token_id in ids:
            shown += stream.push(token_id)
            assert final.startswith(shown)

    def test_a_stop_string_may_span_many_tokens(self) -> None:
        ids = DEMO.encode("one two three four five", add_special_tokens=False)
        stream = TextStream(DEMO, (" two three fo",))
        assert "".join(pieces(stream, ids)) == "one"
        assert stream.stopped

    def test_after_the_stop_nothing_is_shown(self) -> None:
        stream = TextStream(DEMO, ("b",))
        ids = DEMO.encode("a b c d", add_special_tokens=False)
        assert "".join(map(stream.push, ids)) == "a "
        assert stream.stopped
        assert stream.push(ids[0]) == stream.finish() == ""

    def test_a_stop_string_that_completes_at_the_end_is_cut(self) -> None:
        """The last character is incomplete, so it is decoded by finish only."""
        lone = next(i for i in range(DEMO.vocab_size) if DEMO.decode([i]) == "\ufffd")
        stream = TextStream(DEMO, ("\ufffd",))
        ids = [*DEMO.encode("a", add_special_tokens=False), lone]
        assert "".join(pieces(stream, ids)) == "a"
        assert stream.stopped


@given(st.binary(min_size=1, max_size=8), st.text(max_size=12))
def test_bytes_of_tokens_are_those_of_the_text(data: bytes, text: str) -> None:
    """Also of tokens that are a part of a character, or of what is no UTF-8."""
    assert b"".join(map(DEMO.bytes_of, byte_ids(data))) == data
    # A text does not begin with a space there.
    data = data.replace(b" ", b"")
    assert b"".join(sentencepiece_like().bytes_of(_byte(one)) for one in data) == data
    ids = DEMO.encode(text, add_special_tokens=False)
    assert b"".join(map(DEMO.bytes_of, ids)) == DEMO.decode(ids, skip_special=False).encode()
    for special in DEMO.special_ids:
        assert DEMO.bytes_of(special) == DEMO.spell([special])[0].encode()


async def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    """With Python's lock held for as long as this takes, the event loop would turn once or
    twice.
    """
    turns = 0
    encoding = asyncio.create_task(asyncio.to_thread(DEMO.encode, "the little fox ran. " * 50_000))
    while not encoding.done():
        turns += 1
        await asyncio.sleep(0.001)
    assert len(await encoding) > 50_000
    assert turns > 20


def byte_level(**changes: object) -> Tokenizer:
    """Every byte is a token, and some words are; with these steps or special tokens changed."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = [*sorted(alphabet), "aa", "aaaa", "\u0120\u0120"]
    merges = [("a", "a"), ("aa", "aa"), ("\u0120", "\u0120")]
    if changes.pop("without_a_byte", False):
        words.remove("!")
    backend = tokenizers.Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, merges))
    backend.pre_tokenizer = changes.pop(
        "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    backend.decoder = decoders.ByteLevel()
    if "normalizer" in changes:
        backend.normalizer = changes["normalizer"]
    if "special" in changes:
        backend.add_special_tokens([changes["special"]])
    return Tokenizer(backend)


class TestFewestTokens:
    """What a text is refused for before it is tokenized."""

    @given(
        texts,
        st.sampled_from(
            ["a", "aaaa", " ", "  ", "\n", "e\u0301", "\u1f82", "\N{GRINNING FACE}", "<s>"]
        ),
    )
    def test_no_text_has_fewer(self, text: str, word: str) -> None:
        composing = tokenizers.normalizers.NFC()
        for tokenizer in (
            byte_level(),
            sentencepiece_like(),
            byte_level(normalizer=composing),
            DEMO,
        ):
            assert tokenizer.max_token_bytes is not None
            for one in (text, word * 50, text + word * 50):
                assert tokenizer.fewest_tokens(one) <= len(
                    tokenizer.encode(one, add_special_tokens=False)
                )

    @pytest.mark.parametrize(
        "changes",
        [
            {"without_a_byte": True},
            {"normalizer": tokenizers.normalizers.NFKC()},
            {"normalizer": tokenizers.normalizers.Strip()},
            {"normalizer": tokenizers.normalizers.Replace(tokenizers.Regex(" +"), " ")},
            {"normalizer": tokenizers.normalizers.Replace("  ", " ")},
            {"pre_tokenizer": pre_tokenizers.WhitespaceSplit()},
            {
                "pre_tokenizer": pre_tokenizers.Sequence(
                    [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()]
                )
            },
            {"special": tokenizers.AddedToken("<mask>", lstrip=True, special=True)},
        ],
    )
    def test_a_tokenizer_that_may_drop_or_merge_text_refuses_nothing(
        self, changes: dict[str, object]
    ) -> None:
        tokenizer = byte_level(**changes)
        assert tokenizer.max_token_bytes is None
        assert tokenizer.fewest_tokens("a" * 10**6) == 0

    def test_a_text_over_the_bound_is_told_as_a_number(self) -> None:
        assert byte_level().encode_within("b" * 100, 99) == 100
        assert byte_level().encode_within("b" * 100, 100) == byte_level().encode("b" * 100)


@given(
    st.text(st.sampled_from("aé日😀"), max_size=8).map(str.encode),
    st.lists(st.integers(0, 255), max_size=6).map(bytes),
    st.data(),
)
@example(b"\xf0\x9f\x98\x80\xf0", b"", None)
def test_bytes_of_a_cut_character_are_shown_once(
    whole: bytes, rest: bytes, data: st.DataObject | None
) -> None:
    """The decoder shows a whole run of bytes as U+FFFD if one of them is invalid, so also
    characters that were shown before.
    """
    cut = len(whole) if data is None else data.draw(st.integers(0, len(whole)))
    text = whole[:cut].decode(errors="ignore")
    left = cut - len(text.encode())
    ids = [_byte(one) for one in whole[:cut]]
    shown = "".join(pieces(TextStream(sentencepiece_like()), ids))
    assert shown == text + "\ufffd" * left
    later = "".join(pieces(TextStream(sentencepiece_like()), ids + [_byte(one) for one in rest]))
    assert later.startswith(text)


@pytest.mark.parametrize("characters", range(18, 26))
def test_a_prompt_that_ends_in_many_bytes_does_not_garble_the_answer(characters: int) -> None:
    """The window of the prompt's last tokens may begin within a character of three bytes."""
    prompt = [_byte(one) for one in ("\u1000" * characters).encode()]
    answer = "\u1000\u1001" * 4
    ids = [_byte(one) for one in answer.encode()]
    assert "".join(pieces(TextStream(sentencepiece_like(), prompt_ids=prompt), ids)) == answer


@pytest.mark.parametrize("cut", range(60, 84))
@pytest.mark.parametrize("part", ["é", "\u1000", "😀", "é\u1000😀"])
def test_a_prompt_of_many_bytes_may_end_within_a_character(part: str, cut: int) -> None:
    """The window of the prompt's last tokens may also begin within a character."""
    text = part * 60
    data = text.encode()
    prompt, ids = [*map(_byte, data[:cut])], [*map(_byte, data[cut:])]
    whole = len(data[:cut].decode(errors="ignore"))
    shown = pieces(TextStream(sentencepiece_like(), prompt_ids=prompt), ids)
    assert "".join(shown) == text[whole:]
