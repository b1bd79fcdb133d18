"""The retry policy of a push: which attempt follows a failed attempt. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrelay.errors import KvRelayError, Unavailable, Unimplemented


@dataclass(frozen=True, slots=True)
class PushAttempt:
    """One attempt of a push. `why` is the reason for the transport of its blocks."""

    transport: str
    why: str
    # True: repeats the commit without any blocks.
    commit_only: bool = False


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`requested` is the transport that the target names.

    - Unimplemented: grpc replaces a transport that `auto` selected.
    - Unavailable after the commit was sent: the commit is repeated once. Perhaps only the answer
      was lost, and a decode worker that has committed repeats the answer.
    - Any other error ends the push.
    """

    requested: str

    def following(
        self, failed: PushAttempt, error: KvRelayError, *, commit_sent: bool
    ) -> PushAttempt | None:
        """Returns the attempt after `failed`, or None if the push has failed."""
        match error:
            case _ if failed.commit_only:
                return None
            case Unimplemented() if self.requested == "auto" and failed.transport != "grpc":
                return PushAttempt("grpc", f"{failed.transport} failed: {error.message}")
            case Unavailable() if commit_sent:
                return replace(failed, commit_only=True)
        return None
