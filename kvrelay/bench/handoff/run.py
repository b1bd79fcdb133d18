"""The implementation of `kvrelay bench handoff`."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict, dataclass
from typing import Any

from kv_transfer.blocks.block_copy import without_kernel
from kvrelay.bench.cost import model_cost
from kvrelay.bench.environment import model_folder
from kvrelay.bench.handoff.exposed import Exposed, measure_exposed
from kvrelay.bench.handoff.rates import Rate, measure_rates
from kvrelay.bench.handoff.wire_limits import WireLimits, measure_wire_limits
from kvrelay.bench.run import Progress
from kvrelay.engine.runner import ModelRunner
from kvrelay.process.machine import processor_name
from kvrelay.worker.runtime.heap import keep_freed_memory

_MIB = 2**20
_SIZES = tuple(size * _MIB for size in (1, 4, 16, 64, 256, 512))
_PROMPTS = (512, 1024, 2048, 4096)
_EXPOSED_OVER = ("shm", "grpc")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `kvrelay bench handoff`."""

    model: str
    transports: tuple[str, ...]
    # Core of the prefill worker, core of the decode worker.
    cores: tuple[int, int]
    chunk_tokens: int
    runs: int
    quick: bool


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """Results of `kvrelay bench handoff`."""

    model: str
    machine: str
    cores: tuple[int, int]
    chunk_tokens: int
    # Why blocks were copied and digested in two passes; empty if the kernel did both.
    without_kernel: str
    limits: WireLimits
    rates: tuple[Rate, ...]
    exposed: tuple[Exposed, ...]

    def share(self, rate: Rate) -> float:
        """The rate as a share of the limit of this machine."""
        limit: float = getattr(self.limits, rate.limit)
        return rate.bytes_per_second / limit

    def digest_cost(self, rate: Rate) -> float:
        """The extra time for digests, as a share of the time without digests."""
        same = (
            one
            for one in self.rates
            if (one.transport, one.num_bytes) == (rate.transport, rate.num_bytes)
        )
        without = next(one for one in same if not one.digests)
        return rate.seconds / without.seconds - 1

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as plain data for JSON, with the derived figures."""
        rates = [
            {
                **asdict(rate),
                "bytes_per_second": rate.bytes_per_second,
                "limit": rate.limit,
                "share": self.share(rate),
                "digest_cost": self.digest_cost(rate) if rate.digests else None,
            }
            for rate in self.rates
        ]
        exposed = [
            {
                **asdict(one),
                "exposed_share": one.exposed / one.alone,
                "slowdown": one.prefill / one.alone - 1,
            }
            for one in self.exposed
        ]
        limits = {
            "memcpy": self.limits.memcpy,
            "loopback": self.limits.loopback,
            **asdict(self.limits),
        }
        return {**asdict(self), "limits": limits, "rates": rates, "exposed": exposed}


def _limits(options: Options, progress: Progress) -> WireLimits:
    measured = progress("limits of this machine", 1)
    limits = measure_wire_limits(options.cores)
    measured()
    return limits


def run(options: Options, progress: Progress) -> HandoffReport:
    """Runs the benchmark. Raises InvalidArgument or ModelRefused for the model, and Unavailable if
    a process does not start or ends early.
    """
    sizes, prompts = (_SIZES[:3], _PROMPTS[:1]) if options.quick else (_SIZES, _PROMPTS)
    reason = without_kernel()
    before = _limits(options, progress)
    os.sched_setaffinity(0, {options.cores[0]})
    keep_freed_memory()
    path = model_folder(options.model)
    # The answer continues after its first token.
    longest = max(prompts) + 2
    runner = ModelRunner.load(
        path,
        kv_bytes=2 * longest * model_cost(path).kv_token_bytes(),
        max_model_len=longest,
        threads=1,
    )
    over = tuple(one for one in _EXPOSED_OVER if one in options.transports) or options.transports
    exposed = asyncio.run(
        measure_exposed(
            runner, prompts, over, options.runs, options.chunk_tokens, options.cores[1], progress
        )
    )
    layout = runner.layout
    runner.close()
    rates = asyncio.run(
        measure_rates(layout, sizes, options.transports, options.runs, options.cores[1], progress)
    )
    return HandoffReport(
        model=options.model,
        machine=processor_name(),
        cores=options.cores,
        chunk_tokens=options.chunk_tokens,
        without_kernel=reason,
        limits=before.joined(_limits(options, progress)),
        rates=tuple(rates),
        exposed=tuple(exposed),
    )
