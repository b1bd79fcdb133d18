"""What a target's Prometheus counters say of its prefix caches."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvrelay.errors import Internal

# kvrelay's names and vLLM's, which mean the same: tokens looked up, tokens found.
_COUNTER = re.compile(
    r"^(?:kvrelay_|vllm:)prefix_cache_(hits|queries)(?:_total)?(?:\{.*\})? "
    r"(\S+)",
    re.MULTILINE,
)
_NUMBER = re.compile(r"\d+(\.\d*)?([eE][+-]?\d{1,2})?$")


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """In tokens, since the server's start or since an earlier look."""

    hits: int
    queries: int

    def since(self, before: PrefixCache) -> PrefixCache | None:
        """None if they went backwards: the server has started again in between."""
        if self.hits < before.hits or self.queries < before.queries:
            return None
        return PrefixCache(self.hits - before.hits, self.queries - before.queries)


def read_counters(exposition: str) -> PrefixCache | None:
    """From what /metrics answers; None if they are not in it. Raises Internal for one that is no
    number.
    """
    found = {"hits": 0.0, "queries": 0.0}
    series = _COUNTER.findall(exposition)
    for name, number in series:
        if not _NUMBER.match(number):
            raise Internal(
                f"/metrics: prefix_cache_{name} is {number!r:.40}, not a number of tokens"
            )
        found[name] += float(number)
    return PrefixCache(int(found["hits"]), int(found["queries"])) if series else None
