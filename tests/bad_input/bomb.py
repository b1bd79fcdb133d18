"""Pickles that leave a mark where somebody unpickles them, in the forms that somebody might take
them in.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message


class Bomb:
    """Unpickled, it makes the file `mark`."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.mark,)

    def armed(self) -> bool:
        """Whether it goes off where it is unpickled, which leaves no mark behind."""
        for data in (pickle.dumps(self), self.text.encode()):
            pickle.loads(data)  # noqa: S301 - this one is ours
            if not self.mark.exists():
                return False
            self.mark.unlink()
        torch.load(io.BytesIO(self.as_checkpoint), weights_only=False)
        gone_off = self.mark.exists()
        self.mark.unlink(missing_ok=True)
        return gone_off

    @property
    def text(self) -> str:
        """In the oldest protocol, which is ASCII and fits where text does."""
        return pickle.dumps(self, protocol=0).decode("ascii")

    @property
    def as_checkpoint(self) -> bytes:
        """As torch.save writes it: a zip with a pickle in it."""
        buffer = io.BytesIO()
        torch.save({"weight": self}, buffer)
        assert zipfile.is_zipfile(buffer)
        return buffer.getvalue()

    @property
    def as_yaml(self) -> str:
        return (
            f"model: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path "
            f"[{self.mark}]]\n"
        )

    def forms(self) -> list[bytes]:
        raw = [pickle.dumps(self, protocol) for protocol in (0, 2, pickle.HIGHEST_PROTOCOL)]
        marked = (
            b"\x00" * 8 + raw[-1],
            len(raw[-1]).to_bytes(8, "big") + raw[-1],
        )  # as multiprocessing and others frame it
        return [
            *raw,
            *marked,
            base64.b64encode(raw[-1]),
            self.as_checkpoint,
            json.dumps(self.text).encode(),
            self.as_yaml.encode(),
        ]


def filled(kind: type[Message], bomb: Bomb) -> Iterator[Message]:
    """Messages with the bomb in every field that takes text or bytes; one for each way that a
    choice can go.
    """
    choices = [
        one
        for choice in kind.DESCRIPTOR.oneofs
        for one in choice.fields
        if one.message_type is not None
    ]
    for chosen in choices or [None]:
        message = kind()
        _fill(message, bomb, chosen, depth=0)
        yield message


def _fill(message: Message, bomb: Bomb, chosen: FieldDescriptor | None, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if (
            field.containing_oneof is not None
            and chosen is not None
            and field is not chosen
            and depth == 0
        ):
            continue
        if field.message_type is not None:
            if not field.message_type.GetOptions().map_entry and depth < 4:
                below = getattr(message, field.name)
                _fill(below.add() if field.is_repeated else below, bomb, None, depth + 1)
            continue
        value: Any = {
            FieldDescriptor.TYPE_STRING: bomb.text,
            FieldDescriptor.TYPE_BYTES: bomb.forms()[2],
        }.get(field.type, 1)
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
