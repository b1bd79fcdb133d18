"""The protocol version of this build, and the peers that it works with. See docs/versions.md for
the compatibility promises.

The version increases with each change that affects peers. A peer that sends no version speaks
version 0, like builds from before versions were exchanged. Optional features have names; two ends
use the features that both have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from kvrelay.errors import FailedPrecondition

VERSION = 1
OLDEST = 0
# A peer with this feature follows the guidance of SamplingParams. Others would ignore it.
GUIDANCE = "guidance"
# A peer with this feature gives the logprobs of prompts. Others would leave them out.
PROMPT_LOGPROBS = "prompt_logprobs"
# A peer with this feature ends thinking within its budget. Others would go on.
THINKING_BUDGET = "thinking_token_budget"
# A worker with this feature tells routers with this feature which blocks its prefix cache holds.
KV_INDEX = "kv_index"
FEATURES = (
    "full_model_id",
    "system_fingerprint",
    "unknown_ignored",
    GUIDANCE,
    PROMPT_LOGPROBS,
    THINKING_BUDGET,
    KV_INDEX,
)
# Most features that a peer may send. MAX_TEXT bounds the characters of each.
MAX_FEATURES = 64
MAX_TEXT = 64


@dataclass(frozen=True, slots=True)
class Protocol:
    """The protocol of one end of a connection. The default stands for a peer that sends nothing."""

    version: int = 0
    # The oldest peer version that this end works with.
    oldest: int = 0
    features: tuple[str, ...] = field(default=())
    # Release of kvrelay, for people.
    release: str = ""

    def __str__(self) -> str:
        release = f" (kvrelay {printable(self.release)})" if self.release else ""
        return f"protocol {self.version}{release}"

    def refuses(self, peer: Protocol) -> str:
        """Returns why this end and `peer` do not work together, and what to upgrade. Empty if they
        do.
        """
        if peer.version < self.oldest:
            return f"it speaks {peer}; {self} works with {self.oldest} and newer; upgrade the peer"
        if self.version < peer.oldest:
            return (
                f"it speaks {peer} and works with {peer.oldest} and newer; this end speaks {self}; "
                f"upgrade this end"
            )
        return ""

    def check(self, peer: Protocol, name: str) -> None:
        """Raises FailedPrecondition if the two ends do not work together. The message names the
        peer and both versions.
        """
        if reason := self.refuses(peer):
            raise FailedPrecondition(f"{printable(name)} is rejected: {reason}", field="protocol")


@cache
def ours() -> Protocol:
    """Returns the protocol of this process."""
    try:
        release = version("kvrelay")
    except PackageNotFoundError:
        # kvrelay runs from a source tree.
        release = ""
    return Protocol(VERSION, OLDEST, FEATURES, release)


def printable(text: str) -> str:
    """Returns at most MAX_TEXT characters, with unprintable characters replaced by spaces."""
    return "".join(one if one.isprintable() else " " for one in text[:MAX_TEXT])
