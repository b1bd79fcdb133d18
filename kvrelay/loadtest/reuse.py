"""Compares the prefix reuse that was possible for the prompts of a test with the reuse that the
target reports.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvrelay.loadtest.counters import PrefixCache
from kvrelay.loadtest.report.row import Row

# Token ids.
Prompt = Sequence[int]


@dataclass(frozen=True, slots=True)
class Reuse:
    """Counts in prompt tokens of the answered requests. A cache reuses whole blocks and leaves at
    least the last token to compute.
    """

    block_tokens: int
    prompt: int
    # Reusable with an unlimited cache, if each prompt were computed instantly.
    unlimited: int
    # Reusable with an unlimited cache that holds a prompt only from its first token on.
    computed: int
    # Sum of the counts that the target reported per request.
    reported: int
    # Increase of the target's own counters during the test.
    counters: PrefixCache | None = None

    def shares(self) -> dict[str, float]:
        """Returns the counts as shares of the prompt tokens. `counters` is hits divided by
        queries.
        """
        shares = {"unlimited": self.unlimited, "computed": self.computed, "reported": self.reported}
        found = {
            name: tokens / self.prompt if self.prompt else 0.0 for name, tokens in shares.items()
        }
        if self.counters is not None and self.counters.queries:
            found["counters"] = self.counters.hits / self.counters.queries
        return found


def measure_reuse(
    prompts: Mapping[int, Prompt],
    rows: Sequence[Row],
    block_tokens: int,
    counters: PrefixCache | None = None,
) -> Reuse:
    """Computes the reuse of one test. prompts: by position in the plan. counters: the increase of
    the target's counters.
    """
    answered = [row for row in rows if row.ok and row.ttft_s is not None]
    by_arrival = sorted(answered, key=lambda row: (row.scheduled_s, row.index))
    seen: set[int] = set()
    unlimited = 0
    for row in by_arrival:
        prompt = prompts[row.index]
        unlimited += _reusable(prompt, block_tokens, seen)
        seen.update(_prefixes(prompt, block_tokens))
    return Reuse(
        block_tokens=block_tokens,
        prompt=sum(len(prompts[row.index]) for row in answered),
        unlimited=unlimited,
        computed=_computed(prompts, by_arrival, block_tokens),
        reported=sum(row.cached_tokens for row in answered),
        counters=counters,
    )


def _computed(prompts: Mapping[int, Prompt], rows: Sequence[Row], block_tokens: int) -> int:
    """Counts like an unlimited cache that holds the blocks of a prompt only from its first token
    on.
    """
    seen: set[int] = set()
    # Time of the first token of a prompt, and the position of the prompt.
    computing: list[tuple[float, int]] = []
    total = 0
    for row in sorted(rows, key=lambda row: row.scheduled_s + row.late_s):
        assert row.ttft_s is not None
        while computing and computing[0][0] <= row.scheduled_s + row.late_s:
            seen.update(_prefixes(prompts[heapq.heappop(computing)[1]], block_tokens))
        total += _reusable(prompts[row.index], block_tokens, seen)
        heapq.heappush(computing, (row.scheduled_s + row.ttft_s, row.index))
    return total


def _reusable(prompt: Prompt, block_tokens: int, seen: set[int]) -> int:
    blocks = 0
    for prefix in _prefixes(prompt, block_tokens):
        if prefix not in seen:
            break
        blocks += 1
    return min(blocks, math.ceil(len(prompt) / block_tokens) - 1) * block_tokens


def _prefixes(prompt: Prompt, block_tokens: int) -> Iterator[int]:
    """Yields a hash for each whole block, over the block and all blocks before it."""
    before = 0
    for end in range(block_tokens, len(prompt) + 1, block_tokens):
        before = hash((before, tuple(prompt[end - block_tokens : end])))
        yield before
