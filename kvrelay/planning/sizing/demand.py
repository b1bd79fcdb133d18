"""What a cluster is asked for: a workload and an SLO. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from kvrelay.planning.sizing.worker_kind import SequenceKv, WorkerKind
from kvrelay.planning.workload import Workload

# Workers of one pool; larger pools are no plan.
MAX_WORKERS = 4096
# Share of a link that hand-offs may take, so that they do not queue.
LINK_SHARE = 0.7
# Prompt lengths whose times are computed.
_SERVICES = 100
Services = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class LatencySlo:
    """Latencies in seconds that a share of the requests must keep."""

    ttft_s: float
    itl_s: float
    # Share of the requests: above 0, below 1.
    attainment: float = 0.9


@dataclass(frozen=True, slots=True)
class Demand:
    """A workload, its SLO, and the chunks that prompts are computed in."""

    workload: Workload
    slo: LatencySlo
    chunk_tokens: int

    def prompts(self) -> list[tuple[int, int, float]]:
        """Returns (cached tokens, computed tokens, share of the requests) of even quantiles of the
        prompt lengths.
        """
        lengths = sorted(prompt for prompt, _ in self.workload.lengths)
        number = min(_SERVICES, len(lengths))
        found: dict[int, float] = {}
        for index in range(number):
            prompt = lengths[int((index + 0.5) * len(lengths) / number)]
            found[prompt] = found.get(prompt, 0.0) + 1 / number
        return [self._prompt(prompt, share) for prompt, share in found.items()]

    def services(self, kind: WorkerKind) -> list[tuple[float, float]]:
        """Returns (seconds of the prefill, share of the requests) on a worker of this kind."""
        return [
            (kind.costs.prompt_s(computed, self.chunk_tokens, cached), share)
            for cached, computed, share in self.prompts()
        ]

    def handoff_bytes(self, kv: SequenceKv) -> float:
        """Returns the mean bytes of a hand-off."""
        prompts = self.prompts()
        return fsum(share * kv.sequence_bytes(cached + new) for cached, new, share in prompts)

    def mean(self, services: Services) -> float:
        """Returns the mean seconds."""
        return fsum(seconds * share for seconds, share in services)

    def scv(self, services: Services) -> float:
        """Returns the squared coefficient of variation of the seconds."""
        mean = self.mean(services)
        if mean <= 0:
            return 0.0
        return fsum(share * (seconds - mean) ** 2 for seconds, share in services) / mean**2

    def _prompt(self, prompt: int, share: float) -> tuple[int, int, float]:
        # The last token is always computed, since its logits are needed.
        computed = max(1, math.ceil(prompt * (1 - self.workload.cached_share)))
        return prompt - computed, computed, share
