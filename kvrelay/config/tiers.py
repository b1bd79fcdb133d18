"""The tiers behind the KV cache's memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, get_args

from pydantic import Field, model_validator

from kvrelay.config.listen import PeerAddress
from kvrelay.config.section import BadValue, Memory, Section
from kvrelay.types.workers import TierKind

# Stores of one tier.
MAX_STORES = 64
# From the nearest to the farthest.
_ORDER: tuple[TierKind, ...] = get_args(TierKind)
# The keys of each kind, and what they hold.
_NEEDED: dict[TierKind, dict[str, str]] = {
    "host": {"size": "a size such as 8GiB"},
    "disk": {"size": "a size such as 20GiB", "path": "a folder on a local disk"},
    "remote": {"addresses": "HOST:PORT of each `kvrelay kv-store`, such as [127.0.0.1:50061]"},
}


class TierConfig(Section):
    """A tier keeps KV blocks that the KV cache has evicted. Sizes are of one worker."""

    # host: memory of the worker's process, for workers on GPUs. disk: files. remote: stores, which
    # workers of several hosts share; see `kvrelay kv-store`.
    kind: Literal["host", "disk", "remote"]
    # Bytes of one worker. A store has its own size.
    size: Memory | None = None
    # The folder of a disk tier. Workers of one host share it.
    path: str = ""
    # HOST:PORT of the stores of a remote tier, the same for all workers.
    addresses: tuple[PeerAddress, ...] = Field(default=(), max_length=MAX_STORES)

    @property
    def size_bytes(self) -> int:
        """Bytes of one worker; 0 for a remote tier."""
        return self.size or 0

    @model_validator(mode="after")
    def _keys_fit(self) -> TierConfig:
        needed = _NEEDED[self.kind]
        for key in ("size", "path", "addresses"):
            value = getattr(self, key)
            if key in needed and not value:
                raise BadValue(
                    f"is missing; a tier of kind {self.kind} needs {needed[key]}", (key,)
                )
            if key not in needed and value:
                raise BadValue(
                    f"has no meaning for a tier of kind {self.kind}; leave it out", (key,)
                )
        if len(set(self.addresses)) < len(self.addresses):
            raise BadValue("names a store twice; name each store once", ("addresses",))
        return self


def check_tiers(tiers: tuple[TierConfig, ...]) -> None:
    """Raises BadValue for tiers that cannot be combined."""
    kinds = [one.kind for one in tiers]
    for index, kind in enumerate(kinds):
        if kind in kinds[:index]:
            raise BadValue(
                f"there are two tiers of kind {kind}; allowed is one of each: {', '.join(_ORDER)}",
                ("tiers", index, "kind"),
            )
    for index, (nearer, kind) in enumerate(pairwise(kinds), 1):
        if _ORDER.index(nearer) > _ORDER.index(kind):
            raise BadValue(
                f"the tier of kind {kind} comes after {nearer}; list tiers from the nearest to the "
                f"farthest: {', then '.join(_ORDER)}",
                ("tiers", index, "kind"),
            )
