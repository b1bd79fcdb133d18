"""What a test sends, and when: drawn completely before it starts, from one seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvrelay.loadtest.arrivals import arrival_times
from kvrelay.loadtest.lengths import Lengths

_WORDS = (
    *("the", "a", "one", "river", "mountain", "night", "child", "king", "story", "old", "small", "bright"),
    *("found", "lost", "went", "told", "under", "over", "before", "after", "while", "because", "light", "water"),
)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    at: float  # seconds after the test's start
    prompt: str | None
    token_ids: tuple[int, ...] | None  # in place of a prompt
    output_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Workload:
    rate: float  # requests per second
    burstiness: float
    num_requests: int | None
    duration: float | None  # seconds
    prompt_tokens: Lengths
    output_tokens: Lengths
    text: bool  # as many common words instead of token ids
    seed: int

    def plan(self, vocab_size: int) -> list[PlannedRequest]:
        """Token ids are below vocab_size."""
        random = Random(self.seed)
        times = arrival_times(self.rate, self.burstiness, self.num_requests, self.duration, random)
        return [self._request(at, vocab_size, random) for at in times]

    def _request(self, at: float, vocab_size: int, random: Random) -> PlannedRequest:
        length = self.prompt_tokens.draw(random)
        return PlannedRequest(
            at,
            prompt=" ".join(random.choices(_WORDS, k=length)) if self.text else None,
            token_ids=None if self.text else tuple(random.choices(range(vocab_size), k=length)),
            output_tokens=self.output_tokens.draw(random),
            seed=random.getrandbits(31),
        )
