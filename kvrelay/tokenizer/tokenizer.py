"""Text to token ids and back, token by token. Neither torch nor transformers is imported here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

# A call has one text, and is in a thread that can wait
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from kvrelay.errors import ModelRefused, NotFound

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_TRIAL = "a \N{GRINNING FACE}\n0"  # some of it is unknown to most small vocabularies
_NFC = 4  # by which composing characters may shorten text, at most
_BYTES = [f"<0x{number:02X}>" for number in range(256)]  # tokens that a vocabulary falls back to
# Tokens of context, and of text held back because it does not end with a whole character
_MAX_WINDOW = 64


class Tokenizer:
    """A model's `tokenizer.json`."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()  # the file may carry settings of its training
        backend.no_padding()
        self._backend = backend
        self._lengths: dict[int, int] = {}  # token id -> characters of its text

    @classmethod
    def load(cls, model_folder: str | Path) -> Tokenizer:
        """Raises NotFound when the folder has no tokenizer.json, ModelRefused when the file is
        broken.
        """
        path = Path(model_folder) / "tokenizer.json"
        if not path.is_file():
            raise NotFound(
                f"{path} does not exist, so this model takes no text; send token_ids, or add the "
                f"file",
                field="model",
            )
        try:
            found = cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))
            found.decode(found.encode(_TRIAL))  # what is missing in it may show only now
            return found
        except (KeyboardInterrupt, SystemExit):
            raise
        # The library raises nothing more special, and where its Rust panics, less
        except BaseException as error:
            raise ModelRefused(
                f"{path} is not a usable tokenizer: {error!s:.300}", field="model"
            ) from error

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_id(self) -> int:
        """The largest id; vocab_size - 1 unless the ids have holes."""
        return max(self._backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that stand for no text, such as the end of a sequence."""
        return frozenset(
            id_ for id_, token in self._backend.get_added_tokens_decoder().items() if token.special
        )

    @cached_property
    def max_token_bytes(self) -> int | None:
        """The most bytes of UTF-8 that one token can stand for; None where a token may stand for
        any number.

        That is so where the tokenizer drops or merges text: an unknown word that becomes one token,
        spaces that a special token takes with it, a normalizer that is not known here.
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
        # A character of the vocabulary stands for four bytes at most: itself, in UTF-8. Where bytes
        # are written as characters, it stands for one.
        longest = max(map(len, model["vocab"])) * (1 if as_characters else 4)
        special = max((len(one.content.encode()) for one in added), default=1)
        return max(longest, special) * (_NFC if "NFC" in _kinds(described.get("normalizer")) else 1)

    def fewest_tokens(self, text: str) -> int:
        """A number that the tokens of the text cannot be fewer than, from its length alone."""
        most = self.max_token_bytes
        return 0 if most is None else -(-len(text.encode(errors="surrogatepass")) // most)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with special tokens as the tokenizer adds them, e.g. one that begins a
        sequence.

        A text that a chat template made has them already: pass False. Python's lock is free
        meanwhile, as it is not in `tokenizers.Tokenizer.encode`: other threads go on while
        megabytes are encoded.
        """
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_within(
        self, text: str, most: int, add_special_tokens: bool = True
    ) -> list[int] | int:
        """As `encode`, but for more than `most` tokens their number alone: a list of them is not
        made.
        """
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return encoding.ids if len(encoding) <= most else len(encoding)

    def length_of(self, ids: Sequence[int]) -> int:
        """Characters of their text."""
        if len(ids) != 1:
            return len(self.decode(ids))
        length = self._lengths.get(ids[0])
        if length is None:
            length = self._lengths[ids[0]] = len(self.decode(ids))
        return length

    def spell(self, ids: Iterable[int]) -> list[str]:
        """Each token as the vocabulary has it, with its marks for spaces and bytes; ids that are no
        token are empty.
        """
        return [self._backend.id_to_token(one) or "" for one in ids]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of the ids. Bytes that are no UTF-8 show as U+FFFD; ids that are no token show as
        nothing.
        """
        if len(ids) > _MAX_WINDOW:  # Python's lock is free meanwhile, as in `encode`
            return self._backend.decode_batch([ids], skip_special_tokens=skip_special)[0]
        return self._backend.decode(ids, skip_special_tokens=skip_special)


def _kinds(step: Mapping[str, Any] | None) -> Iterator[str]:
    """Of a step of tokenizer.json and of its parts."""
    return (one["type"] for one in _parts(step))


def _parts(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
    for part in (*step.get("normalizers", ()), *step.get("pretokenizers", ())):
        yield from _parts(part)


def _keeps_text(step: Mapping[str, Any] | None, name: str) -> bool:
    """Whether the step is one that drops nothing."""
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
    """Text of a growing sequence, up to the first stop string.

    Pieces of `push` and `finish`, joined, are the decoded sequence, or what of it lies before the
    stop string. A piece never holds half a character, nor text that may turn out to be the
    beginning of a stop string.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Iterable[str] = (), prompt_ids: Sequence[int] = ()
    ) -> None:
        self._text = _Detokenizer(tokenizer, prompt_ids)
        self._stop = _StopStrings(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met. What is pushed from then on shows nothing."""
        return self._stop.met

    def push(self, token_id: int) -> str:
        """The text that may be shown now that `token_id` has come."""
        return self._stop.push(self._text.push(token_id))

    def finish(self) -> str:
        """The text that was held back. To be called once, after the last token."""
        return self._stop.push(self._text.finish()) + self._stop.finish()


class _Detokenizer:
    """Decodes a short window: the tokens shown last, as context for the decoder, and those not
    shown yet.

    `tokenizers.decoders.DecodeStream` works alike, but it does not give out what it holds at the
    end, repeats the prompt when that ends within a character, and holds invalid bytes without a
    bound.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids
        self._window = list(prompt_ids[-_MAX_WINDOW:])
        self._context = len(self._window)  # tokens
        # Characters of the window's text
        self._shown = len(tokenizer.decode(self._window).rstrip(_REPLACEMENT))

    def push(self, token_id: int) -> str:
        if token_id in self._special_ids:
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        # Perhaps the beginning of a character
        half = text.endswith(_REPLACEMENT) or len(text) == self._shown
        if half and len(self._window) - self._context < _MAX_WINDOW:
            return ""
        return self._show(text)

    def finish(self) -> str:
        return self._show(self._tokenizer.decode(self._window))

    def _show(self, text: str) -> str:
        piece = text[self._shown :]
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._shown = self._tokenizer.length_of(self._window)
        return piece


class _StopStrings:
    """Passes text on until the first stop string is complete, cuts it off there, and drops the
    rest.
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self._strings = tuple(stop)
        assert all(self._strings), "a stop string is empty"
        self._held = ""
        self.met = False

    def push(self, text: str) -> str:
        if not self._strings:
            return text
        if self.met:
            return ""
        self._held += text
        matches = [
            (start + len(stop), start)
            for stop in self._strings
            if (start := self._held.find(stop)) >= 0
        ]
        if matches:
            self.met = True
            _, cut = min(matches)
        else:
            cut = len(self._held) - self._open()
        piece, self._held = self._held[:cut], self._held[cut:]
        return piece

    def finish(self) -> str:
        return "" if self.met else self._held

    def _open(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._strings), default=0)
        for length in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._strings):
                return length
        return 0
