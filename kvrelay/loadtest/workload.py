"""A synthetic workload: the requests and their times, drawn from one seed."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from random import Random
from typing import Any

from kvrelay.errors import InvalidArgument
from kvrelay.loadtest.arrivals import arrival_times
from kvrelay.loadtest.lengths import Lengths
from kvrelay.loadtest.rate import Rate, rate_text

_WORDS = (
    *(
        "the",
        "a",
        "one",
        "river",
        "mountain",
        "night",
        "child",
        "king",
        "story",
        "old",
        "small",
        "bright",
    ),
    *(
        "found",
        "lost",
        "went",
        "told",
        "under",
        "over",
        "before",
        "after",
        "while",
        "because",
        "light",
        "water",
    ),
)


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a plan."""

    # Seconds after the start of the test.
    at: float
    prompt: str | None
    # Replaces the prompt.
    token_ids: tuple[int, ...] | None
    output_tokens: int
    seed: int

    def variant(self, number: int, vocab_size: int) -> PlannedRequest:
        """Returns a request of the same length that shares no prefix with the other variants, so no
        cache helps it.
        """
        if self.token_ids is None:
            return replace(self, prompt=f"{number} {self.prompt}")
        return replace(
            self, token_ids=tuple((token + number) % vocab_size for token in self.token_ids)
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """The parameters of a synthetic workload."""

    # None: closed loop, in which each request is due at once.
    rate: Rate | None
    burstiness: float
    num_requests: int | None
    # Seconds.
    duration: float | None
    prompt_tokens: Lengths
    output_tokens: Lengths
    # Prompts are common words, as many as the drawn length, instead of token ids.
    text: bool
    seed: int

    def plan(self, vocab_size: int, max_model_len: int = 0) -> Iterator[PlannedRequest]:
        """Yields the requests. Token ids are below vocab_size. A closed loop without num_requests
        is endless. A prompt that is longer than max_model_len (0: unknown) has one token more than
        that: no server accepts it, however long it is.
        """
        random = Random(self.seed)
        times: list[float] | repeat[float]
        if self.rate is not None:
            times = arrival_times(
                self.rate, self.burstiness, self.num_requests, self.duration, random
            )
        else:
            times = repeat(0.0) if self.num_requests is None else repeat(0.0, self.num_requests)
        # A list shares its int objects: millions of drawn tokens then take one pointer each, not
        # one int each.
        ids = list(range(vocab_size))
        most = max_model_len + 1 if max_model_len else sys.maxsize
        return (self._request(at, ids, most, random) for at in times)

    def check_fits(self, model: str, max_model_len: int) -> None:
        """Raises InvalidArgument if requests do not fit into the model's context. max_model_len: 0
        if unknown.
        """
        longest = self.prompt_tokens.longest + self.output_tokens.longest
        if max_model_len and longest > max_model_len:
            raise InvalidArgument(
                f"--prompt-tokens {self.prompt_tokens} and --output-tokens {self.output_tokens} "
                f"make requests of up to {longest} tokens, and the context of {model} holds "
                f"{max_model_len}; give lengths that add up to at most {max_model_len}",
                field="prompt_tokens",
            )

    def options(self) -> dict[str, Any]:
        """Returns the options of the workload as JSON values."""
        return {
            "rate": None if self.rate is None else rate_text(self.rate),
            "burstiness": "inf" if math.isinf(self.burstiness) else self.burstiness,
            "num_requests": self.num_requests,
            "duration": self.duration,
            "prompt_tokens": str(self.prompt_tokens),
            "output_tokens": str(self.output_tokens),
            "text": self.text,
            "seed": self.seed,
        }

    def _request(self, at: float, ids: list[int], most: int, random: Random) -> PlannedRequest:
        length = min(most, self.prompt_tokens.draw(random))
        return PlannedRequest(
            at,
            prompt=" ".join(random.choices(_WORDS, k=length)) if self.text else None,
            token_ids=None if self.text else tuple(random.choices(ids, k=length)),
            output_tokens=self.output_tokens.draw(random),
            seed=random.getrandbits(31),
        )
