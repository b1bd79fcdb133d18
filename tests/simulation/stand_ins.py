"""What production code reaches by name, replaced for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def in_place(places: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """`places` are (owner, name of its attribute, stand-in)."""
    places = tuple(places)
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in places]
    for owner, name, ours in places:
        setattr(owner, name, ours)
    try:
        yield
    finally:
        for owner, name, theirs in before:
            setattr(owner, name, theirs)
