"""What the stages need of the sequences that an engine runs. The native engine's schedulers and
vLLM's both have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kvrelay.worker.sequence import Sequence
from kvrelay.worker.steps.prompt_rate import PromptRate


class Batch(Protocol):
    """The sequences of one worker, running or waiting."""

    def __len__(self) -> int:
        """Number of sequences, running and waiting."""
        ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence to prefill here."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence. Its blocks are released now, or at the end of the running step."""
        ...


class PrefillBatch(Batch, Protocol):
    """The sequences of a prefill worker."""

    @property
    def prompt_rate(self) -> PromptRate:
        """How fast prompts are computed."""
        ...


class DecodeBatch(Batch, Protocol):
    """The sequences of a decode worker."""

    # Whether a sequence may join at any time.
    expects_answers: bool

    @property
    def preemptions(self) -> int:
        """Sequences that were preempted since the start."""
        ...

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences that do not run, oldest first."""
        ...

    @property
    def decodes(self) -> bool:
        """Whether a sequence decodes."""
        ...

    def resume(self, sequence: Sequence) -> None:
        """Adds a sequence to prefill here, which may hold its blocks already, with a part of its
        KV.
        """
        ...

    def join(self, sequence: Sequence, now: float) -> None:
        """Adds a sequence whose KV was handed over, except that of its last token. now: in
        monotonic seconds.
        """
        ...

    def units_awaited(self, priority: int) -> int:
        """The available blocks that a new sequence of this priority must leave to others."""
        ...

    def prompt_tokens_per_second(self, answering: float, now: float) -> float | None:
        """Returns the rate at which a prompt would be computed: 0 if the answers leave no time,
        None if unknown. answering: share of the time in which sequences decode, 0 to 1.
        """
        ...
