"""Converts text to token ids, and token ids to text, token by token. This module imports neither
torch nor transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

# A call has a single text and runs in a thread that may block, so parallelism does not help.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from kvrelay.errors import ModelRefused, NotFound
from kvrelay.models import TOKENIZER_FILE

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Most small vocabularies lack some of these characters.
_TRIAL = "a \N{GRINNING FACE}\n0"
# Most by which the composition of characters (NFC) can shorten text.
_NFC = 4
# Byte-fallback tokens of a vocabulary.
_BYTES = [f"<0x{number:02X}>" for number in range(256)]
# The bytes of printable characters are spelled as these, in a byte-level vocabulary, and the others
# as the characters from 256 on (GPT-2, Radford et al., 2019).
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (one for one in range(256) if one not in _PRINTABLE)
_BYTE_LEVEL = {chr(one): one for one in _PRINTABLE} | {
    chr(256 + place): one for place, one in enumerate(_OTHERS)
}
# Most bytes of a character in UTF-8, and so the most tokens of it.
_CHARACTER_BYTES = 4
# Most tokens of context, and of text held back because it does not end with a whole character.
_MAX_WINDOW = 64


class Tokenizer:
    """The tokenizer of a model's `tokenizer.json`."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # The file may contain settings from the training.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        # Token id -> its text.
        self._texts: dict[int, str] = {}

    @classmethod
    def load(cls, model_folder: str | Path) -> Tokenizer:
        """Loads the tokenizer of a model folder. Raises NotFound if the folder has no
        tokenizer.json, and ModelRefused if the file is broken.
        """
        path = Path(model_folder) / TOKENIZER_FILE
        if not path.is_file():
            raise NotFound(
                f"{path} does not exist, so this model accepts no text; send token_ids, or add "
                "the file",
                field="model",
            )
        try:
            found = cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))
            # Missing parts of the file may show only in use.
            found.decode(found.encode(_TRIAL))
            return found
        except (KeyboardInterrupt, SystemExit):
            raise
        # The library raises plain Exception, and for a panic in its Rust code a BaseException.
        except BaseException as error:
            raise ModelRefused(
                f"{path} is not a valid tokenizer: {error!s:.300}", field="model"
            ) from error

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, including special tokens."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_id(self) -> int:
        """The largest token id: vocab_size - 1 unless the ids have gaps."""
        return max(self._backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which have no text, for example the end of a sequence."""
        return frozenset(
            id_ for id_, token in self._backend.get_added_tokens_decoder().items() if token.special
        )

    def special_tokens(self, texts: Iterable[str]) -> dict[int, str]:
        """Returns those of the texts that are special tokens, by token id."""
        found = ((self._backend.token_to_id(one), one) for one in texts)
        return {id_: one for id_, one in found if id_ in self.special_ids}

    def token_id(self, text: str) -> int | None:
        """Returns the id of the token that is spelled like this, None if there is none."""
        return self._backend.token_to_id(text)

    @cached_property
    def max_token_bytes(self) -> int | None:
        """Most bytes of UTF-8 that one token can represent; None if there is no bound.

        There is no bound if the tokenizer drops or merges text: an unknown word that becomes one
        token, spaces that a special token absorbs, or an unknown normalizer.
        """
        described = json.loads(self._backend.to_str())
        model = described["model"]
        added = self._backend.get_added_tokens_decoder().values()
        as_characters = "ByteLevel" in _kinds(described.get("pre_tokenizer"))
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet() if as_characters else _BYTES
        if model.get("type") != "BPE" or not model["vocab"].keys() >= set(alphabet):
            return None
        if not (as_characters or model.get("byte_fallback")) or any(
            one.lstrip or one.rstrip for one in added
        ):
            return None
        if not all(
            _keeps_text(described.get(step), step) for step in ("normalizer", "pre_tokenizer")
        ):
            return None
        # A character of a vocabulary entry represents at most four bytes: itself, in UTF-8. In a
        # byte-level vocabulary, each character represents one byte.
        longest = max(map(len, model["vocab"])) * (1 if as_characters else 4)
        special = max((len(one.content.encode()) for one in added), default=1)
        return max(longest, special) * (_NFC if "NFC" in _kinds(described.get("normalizer")) else 1)

    def fewest_tokens(self, text: str) -> int:
        """Returns a lower bound for the number of tokens of the text, computed from its length
        alone.
        """
        most = self.max_token_bytes
        return 0 if most is None else -(-len(text.encode(errors="surrogatepass")) // most)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids. With `add_special_tokens`, the tokenizer adds its special tokens,
        e.g. at the beginning of a sequence.

        Pass False for text from a chat template, which already contains the special tokens. This
        method releases Python's lock, unlike `tokenizers.Tokenizer.encode`, so other threads run
        while megabytes are encoded.
        """
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_within(
        self, text: str, most: int, add_special_tokens: bool = True
    ) -> list[int] | int:
        """Encodes like `encode`. For more than `most` tokens, returns only their number, without
        building the list.
        """
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return encoding.ids if len(encoding) <= most else len(encoding)

    def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids like `decode`, faster for a single id."""
        if len(ids) != 1:
            return self.decode(ids)
        text = self._texts.get(ids[0])
        if text is None:
            text = self._texts[ids[0]] = self.decode(ids)
        return text

    def spell(self, ids: Iterable[int]) -> list[str]:
        """Returns each token as the vocabulary spells it, with its marks for spaces and bytes.
        Unknown ids give empty strings.
        """
        return [self._backend.id_to_token(one) or "" for one in ids]

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is a byte-fallback token."""
        return self._backend.id_to_token(token_id) in _BYTES

    def bytes_of(self, token_id: int) -> bytes:
        """Returns the bytes of a token's text. The bytes of a token that is a part of a character
        are no valid UTF-8.
        """
        text = self.decode([token_id], skip_special=False)
        if _REPLACEMENT not in text:
            return text.encode()
        spelled = self._backend.id_to_token(token_id) or ""
        known = self._spelled_bytes
        if token_id in self._added_ids or not all(part in known for part in _spelling(spelled)):
            return text.encode()
        return bytes(known[part] for part in _spelling(spelled))

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def _spelled_bytes(self) -> dict[str, int]:
        """The bytes that parts of the vocabulary's spellings stand for: characters of a byte-level
        vocabulary, and byte-fallback tokens.
        """
        decoder = json.loads(self._backend.to_str()).get("decoder")
        found = {one: number for number, one in enumerate(_BYTES)}
        return found | _BYTE_LEVEL if "ByteLevel" in _kinds(decoder) else found

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Returns the text of the ids. Invalid UTF-8 becomes U+FFFD; unknown ids give no text."""
        # `decode_batch` releases Python's lock, as in `encode`.
        if len(ids) > _MAX_WINDOW:
            return self._backend.decode_batch([ids], skip_special_tokens=skip_special)[0]
        return self._backend.decode(ids, skip_special_tokens=skip_special)


def _spelling(token: str) -> Sequence[str]:
    """Returns the parts of a token's spelling: the whole of a byte-fallback token, else each
    character.
    """
    return [token] if token in _BYTES else token


def _kinds(step: Mapping[str, Any] | None) -> Iterator[str]:
    """Yields the types of a step of tokenizer.json and of its parts."""
    return (one["type"] for one in _parts(step))


def _parts(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
    inner = ("normalizers", "pretokenizers", "decoders")
    for part in (one for name in inner for one in step.get(name, ())):
        yield from _parts(part)


def _keeps_text(step: Mapping[str, Any] | None, name: str) -> bool:
    """Whether the step drops no text."""
    return all(_keeps(part, name) for part in _parts(step))


def _keeps(part: Mapping[str, Any], name: str) -> bool:
    kind = part["type"]
    if name == "normalizer":
        if kind == "Replace":
            old = part["pattern"].get("String")
            return old is not None and len(part["content"].encode()) >= len(old.encode())
        return kind in ("NFC", "Prepend", "ByteLevel")
    if kind == "Split":
        return part.get("behavior") != "Removed"
    return kind in ("ByteLevel", "Digits", "Metaspace")


class TextStream:
    """The text of a growing sequence, up to the first stop string.

    The joined pieces of `push` and `finish` are the decoded sequence, cut before the first stop
    string. A piece never contains part of a character, nor text that may be the beginning of a stop
    string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Iterable[str] = (),
        prompt_ids: Sequence[int] = (),
        markers: Iterable[str] = (),
        min_tokens: int = 0,
    ) -> None:
        """`markers`: special tokens that appear in the text. Others have no text. min_tokens: stop
        strings that are complete after this many tokens are text.
        """
        self._text = _Detokenizer(tokenizer, prompt_ids)
        self._stop = _StopStrings(stop)
        self._early_tokens = min_tokens
        self._markers = tokenizer.special_tokens(markers)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found. Later tokens then give no text."""
        return self._stop.met is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._stop.met

    def push(self, token_id: int) -> str:
        """Adds a token. Returns the text that can be shown now."""
        marker = self._markers.get(token_id)
        text = self._text.push(token_id) if marker is None else self._text.finish() + marker
        if self._early_tokens:
            self._early_tokens -= 1
            return self._stop.push_early(text)
        return self._stop.push(text)

    def finish(self) -> str:
        """Returns the text that was held back. Call once, after the last token."""
        push = self._stop.push_early if self._early_tokens else self._stop.push
        return push(self._text.finish()) + self._stop.finish()


class TokenOffsets:
    """Where the text of each token begins in the text of a growing sequence."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._text = _Detokenizer(tokenizer, prompt_ids)
        # Characters of the text before `_held`, the text that still may change.
        self._shown = 0
        self._held = self._text.held()

    def push(self, token_id: int) -> int:
        """Adds a token. Returns the characters before its text. For a token that is a part of a
        character, the text begins at that character.
        """
        before = self._held
        piece = self._text.push(token_id)
        text = piece or self._text.held()
        # The new token may turn U+FFFD at the end into the character that it completes.
        pairs = zip(before, text, strict=False)
        same = next((at for at, (old, new) in enumerate(pairs) if old != new), len(before))
        if text == before and text.endswith(_REPLACEMENT):
            # The token continues a character that is still incomplete.
            same -= 1
        elif self._tokenizer.is_byte(token_id):
            # Each byte of a character that is still incomplete is a U+FFFD.
            whole = text.rstrip(_REPLACEMENT)
            same = len(whole) if whole == before.rstrip(_REPLACEMENT) else same
        offset = self._shown + same
        self._shown += len(piece)
        self._held = "" if piece else text
        return offset


class _Detokenizer:
    """Decodes a short window of tokens: those shown last, as context for the decoder, and those not
    shown yet.

    `tokenizers.decoders.DecodeStream` is similar, but it does not return the held text at the end,
    repeats the prompt if the prompt ends within a character, and holds invalid bytes without a
    bound.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids
        self._window = list(prompt_ids[-_MAX_WINDOW:])
        text = tokenizer.decode(self._window)
        if len(prompt_ids) > _MAX_WINDOW and text.startswith(_REPLACEMENT):
            self._window = _from_whole_character(tokenizer, self._window)
            text = tokenizer.decode(self._window)
        # Tokens.
        self._context = len(self._window)
        # What of the window's text is shown.
        self._shown = text
        # Texts of the prompt and of its beginnings, if the prompt may end with part of a character.
        self._beginnings: list[str] = []
        if text.endswith(_REPLACEMENT):
            ends = range(len(self._window), max(-1, len(self._window) - _CHARACTER_BYTES), -1)
            self._beginnings = [tokenizer.decode(self._window[:end]) for end in ends]

    def push(self, token_id: int) -> str:
        if token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        text = self._decode()
        # The text may end with part of a character.
        half = text.endswith(_REPLACEMENT) or len(text) == len(self._shown)
        if half and len(self._window) - self._context < _MAX_WINDOW:
            return ""
        return self._show(text)

    def held(self) -> str:
        """Returns the text that is not shown yet. It may end with part of a character."""
        return self._decode()[len(self._shown) :]

    def finish(self) -> str:
        return self._show(self._decode())

    def _decode(self) -> str:
        """Returns the text of the window. If it completes a character that the prompt began, that
        character is not shown yet.
        """
        text = self._tokenizer.decode(self._window)
        if self._beginnings:
            same = (one for one in self._beginnings if text.startswith(one))
            self._shown = next(same, "")
        elif not text.startswith(self._shown):
            # Decoders of bytes show a run of bytes as U+FFFD if one of them is invalid: those of
            # the context, too.
            text = self._shown + self._tokenizer.decode(self._window[self._context :])
        return text

    def _show(self, text: str) -> str:
        piece = text[len(self._shown) :]
        # The context has to begin with a whole character.
        if not self._beginnings:
            self._window = self._window[self._context :]
        self._context = len(self._window)
        self._shown = self._tokenizer.text_of(self._window)
        self._beginnings = []
        return piece


def _from_whole_character(tokenizer: Tokenizer, window: list[int]) -> list[int]:
    """Returns the window without the tokens of a character that begins before it. The window may
    also end within a character.
    """
    for left in range(_CHARACTER_BYTES):
        end = len(window) - left
        for cut in range(_CHARACTER_BYTES):
            if not tokenizer.decode(window[cut:end]).startswith(_REPLACEMENT):
                return window[cut:]
    return window


class _StopStrings:
    """Passes text on until the first stop string is complete. Cuts the text there and drops the
    rest.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self._strings = tuple(stop)
        assert all(self._strings), "a stop string is empty"
        self._held = ""
        # Characters at the beginning of the held text in which no stop string can end.
        self._early = 0
        # The stop string that was found.
        self.met: str | None = None

    def push(self, text: str) -> str:
        if not self._strings:
            return text
        if self.met is not None:
            return ""
        self._held += text
        matches = [
            (start + len(stop), start, stop)
            for stop in self._strings
            if (start := self._held.find(stop, max(0, self._early + 1 - len(stop)))) >= 0
        ]
        if matches:
            _, cut, self.met = min(matches)
        else:
            cut = len(self._held) - self._open()
        return self._take(cut)

    def push_early(self, text: str) -> str:
        """Like `push`, for text in which no stop string can end. One can begin in it."""
        self._held += text
        piece = self._take(len(self._held) - self._open())
        self._early = len(self._held)
        return piece

    def _take(self, cut: int) -> str:
        piece, self._held = self._held[:cut], self._held[cut:]
        self._early = max(0, self._early - cut)
        return piece

    def finish(self) -> str:
        return self._held if self.met is None else ""

    def _open(self) -> int:
        """Returns the length of the longest suffix of the held text that begins a stop string."""
        longest = max(map(len, self._strings), default=0)
        for length in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._strings):
                return length
        return 0
