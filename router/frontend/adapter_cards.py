"""The adapters that this router serves, by the names that requests give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kvrelay.config.adapters import AdapterConfig, AdaptersConfig
from kvrelay.errors import ConfigError
from kvrelay.models.adapters.adapter_files import read_adapter

# Least similarity of a name that is suggested for an unknown one.
_NEAR = 0.5


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """A served adapter. A request keeps the version of the files that it was admitted with."""

    name: str
    # Hash of the adapter's files.
    adapter_id: str
    # Name of the folder. Its path is not for clients.
    root: str


class AdapterCards:
    """The served adapters, by name. Requests of other names are rejected."""

    def __init__(self, cards: tuple[AdapterCard, ...] = ()) -> None:
        self._cards: dict[str, AdapterCard] = {}
        self._pairs: dict[str, frozenset[str]] = {}
        self.replace({card.name: card for card in cards})

    def __iter__(self) -> Iterator[AdapterCard]:
        return iter(tuple(self._cards.values()))

    @classmethod
    def load(cls, config: AdaptersConfig, base: str) -> AdapterCards:
        """Reads and hashes the configured folders. Raises ModelRefused, and ConfigError if an
        adapter has the name `base`, which is that of the base model.
        """
        if any(one.name == base for one in config.serve):
            raise ConfigError(
                f"adapters.serve: {base!r} is the name of the base model; give the adapter another"
            )
        return cls(tuple(_card(one, config.max_rank) for one in config.serve))

    def replace(self, cards: dict[str, AdapterCard]) -> None:
        """Serves these adapters from now on."""
        if cards.keys() != self._cards.keys():
            self._pairs = {name: _pairs(name) for name in cards}
        self._cards = cards

    def get(self, name: str) -> AdapterCard | None:
        """The adapter of that name; None if there is none."""
        return self._cards.get(name)

    @property
    def described(self) -> str:
        """The number of adapters, for a message after the name of the base model."""
        count = len(self._cards)
        return f" and {count} adapter{'s' * (count > 1)}, see /v1/models" if count else ""

    def near(self, name: str, base: str) -> str:
        """The served name that is most like `name`; empty if none is.

        The time grows with the names' lengths and number, since the caller holds up an event loop.
        """
        wanted = _pairs(name[:128])
        served = {base: _pairs(base), **self._pairs}
        likeness, found = max((_likeness(wanted, pairs), one) for one, pairs in served.items())
        return found if likeness >= _NEAR else ""


def _pairs(name: str) -> frozenset[str]:
    """The pairs of neighbouring characters, in lower case. The ends count as characters."""
    text = f"\0{name.lower()}\0"
    return frozenset(map("".join, pairwise(text)))


def _likeness(one: frozenset[str], other: frozenset[str]) -> float:
    """The Sørensen-Dice coefficient of two sets that are not empty: 0 to 1."""
    return 2 * len(one & other) / (len(one) + len(other))


def _card(adapter: AdapterConfig, max_rank: int) -> AdapterCard:
    files = read_adapter(adapter.path, max_rank)
    return AdapterCard(adapter.name, files.adapter_id, folder_name(adapter.path))


def folder_name(path: str) -> str:
    """The last part of a path: what clients may see of it."""
    return Path(path).name
