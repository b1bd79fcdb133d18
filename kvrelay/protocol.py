"""The protocol version that this build speaks, and which peers it works with. docs/versions.md has
the promises.

The version counts up with each change that a peer has to know of. A peer that names no version
speaks version 0: builds before versions were exchanged. Optional parts have names, so that each of
two ends uses what both have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from kvrelay.errors import FailedPrecondition

VERSION = 1
OLDEST = 0
FEATURES = ("full_model_id", "system_fingerprint", "unknown_ignored")
MAX_FEATURES = 64  # names that a peer may give, and characters of each
MAX_TEXT = 64


@dataclass(frozen=True, slots=True)
class Protocol:
    """What one end of a connection speaks. The default is that of a peer that says nothing."""

    version: int = 0
    oldest: int = 0  # the oldest version of a peer that this end works with
    features: tuple[str, ...] = field(default=())
    release: str = ""  # of kvrelay, for people

    def __str__(self) -> str:
        release = f" (kvrelay {printable(self.release)})" if self.release else ""
        return f"protocol {self.version}{release}"

    def refuses(self, peer: Protocol) -> str:
        """Why this end and `peer` do not work together, and what to upgrade; empty if they do."""
        if peer.version < self.oldest:
            return f"it speaks {peer}; {self} works with {self.oldest} and newer; upgrade the peer"
        if self.version < peer.oldest:
            return (
                f"it speaks {peer} and works with {peer.oldest} and newer; this end speaks {self}; "
                f"upgrade this end"
            )
        return ""

    def check(self, peer: Protocol, name: str) -> None:
        """Raises FailedPrecondition, which names the peer and both versions."""
        if reason := self.refuses(peer):
            raise FailedPrecondition(f"{printable(name)} is refused: {reason}", field="protocol")


@cache
def ours() -> Protocol:
    """Of this process."""
    try:
        release = version("kvrelay")
    except PackageNotFoundError:  # run from a source tree
        release = ""
    return Protocol(VERSION, OLDEST, FEATURES, release)


def printable(text: str) -> str:
    """At most MAX_TEXT characters, none of which moves a terminal's cursor."""
    return "".join(one if one.isprintable() else " " for one in text[:MAX_TEXT])
