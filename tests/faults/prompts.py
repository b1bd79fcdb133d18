"""Prompts of random tokens: no two begin alike."""

from __future__ import annotations

import random


def tokens(count: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(300) for _ in range(count))


PROMPT = tokens(200, 1)  # two chunks
OTHER = tokens(150, 2)
LONG = tokens(700, 3)  # six chunks
SEEDED = {"temperature": 1.1, "top_p": 0.95, "seed": 11, "presence_penalty": 0.4}
