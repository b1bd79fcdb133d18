"""The requests that a verification sends over every path."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvrelay.client import GenerateOptions

# Prompt tokens, drawn log-uniformly.
_LENGTHS = (1, 512)
# Tokens.
_ANSWERS = (16, 96)
_SAMPLINGS: tuple[GenerateOptions, ...] = (
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 0.8, "frequency_penalty": 0.5, "top_k": 50, "top_p": 0.95},
)


@dataclass(frozen=True, slots=True)
class Case:
    """One request. Greedy answers are compared with transformers' own `generate`, and all answers
    with each other.
    """

    name: str
    token_ids: tuple[int, ...]
    # For the client; they include token_ids.
    options: GenerateOptions

    @property
    def greedy(self) -> bool:
        """Whether the request samples greedily."""
        return self.options["temperature"] == 0


def make_cases(count: int, vocab_size: int, max_model_len: int, seed: int = 0) -> list[Case]:
    """Returns `count` requests of mixed length, alternating greedy and seeded sampling. Equal
    arguments give equal requests.
    """
    draw = random.Random(seed)
    cases = []
    for number in range(count):
        # Leaves room for a prompt in a small context.
        answer = min(draw.randint(*_ANSWERS), max_model_len // 2)
        longest = min(_LENGTHS[1], max_model_len - answer)
        length = min(longest, round(_LENGTHS[0] * (longest / _LENGTHS[0]) ** draw.random()))
        options: GenerateOptions = {"temperature": 0.0}
        if number % 2:
            options = {**_SAMPLINGS[number // 2 % len(_SAMPLINGS)], "seed": draw.getrandbits(31)}
        options["max_tokens"] = answer
        options["token_ids"] = token_ids = tuple(draw.randrange(vocab_size) for _ in range(length))
        kind = "sampled" if number % 2 else "greedy"
        cases.append(Case(f"{number:03d} ({length} tokens, {kind})", token_ids, options))
    return cases
