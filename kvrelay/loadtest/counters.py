"""The Prometheus counters of a target's prefix cache."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvrelay.errors import Internal

# kvrelay's names and vLLM's names have the same meaning: tokens looked up, tokens found.
_COUNTER = re.compile(
    r"^(?:kvrelay_|vllm:)prefix_cache_(hits|queries)(?:_total)?(?:\{.*\})? "
    r"(\S+)",
    re.MULTILINE,
)
_NUMBER = re.compile(r"\d+(\.\d*)?([eE][+-]?\d{1,2})?$")


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """Counters in tokens, since the start of the server or since an earlier reading."""

    hits: int
    queries: int

    def since(self, before: PrefixCache) -> PrefixCache | None:
        """Returns the increase since `before`. Returns None if a counter decreased, because then
        the server has restarted.
        """
        if self.hits < before.hits or self.queries < before.queries:
            return None
        return PrefixCache(self.hits - before.hits, self.queries - before.queries)


def read_counters(exposition: str) -> PrefixCache | None:
    """Reads the counters from the text of /metrics. Returns None if they are missing. Raises
    Internal for a value that is not a number.
    """
    found = {"hits": 0.0, "queries": 0.0}
    series = _COUNTER.findall(exposition)
    for name, number in series:
        if not _NUMBER.match(number):
            raise Internal(
                f"/metrics: prefix_cache_{name} is {number!r:.40}; expected a number of tokens"
            )
        found[name] += float(number)
    return PrefixCache(int(found["hits"]), int(found["queries"])) if series else None
