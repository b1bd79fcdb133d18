"""The router's own entry in the registry, and the registry data that the router reads besides
workers.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvrelay.clock import Clock
from kvrelay.errors import KvRelayError, Unavailable
from kvrelay.process.telemetry import get_logger
from kvrelay.protocol_version import VERSION
from kvrelay.types.control_plane import RouterLoad, ScalingDecision
from router.observability.metrics import Metrics
from router.observability.traffic import Latencies, Traffic, percentiles
from router.runtime.driver import Driver
from router.runtime.worker_directory import RouterRegistry

HEARTBEAT_S = 1.0
# Between two heartbeats, however many requests find the decode pool empty.
LEAST_S = 0.1
# There are fewer decisions between two heartbeats.
DECISIONS = 20
# As many as the registry keeps.
_REMEMBERED = 100
log = get_logger("router.heartbeat")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Heartbeat:
    """Publishes the router's load and reads the wanted sizes and scaling decisions."""

    def __init__(
        self,
        router_id: str,
        driver: Driver,
        metrics: Metrics,
        registry: RouterRegistry,
        clock: Clock,
        troubles: Sequence[Callable[[], str]] = (),
    ) -> None:
        self._router_id = router_id
        self._driver = driver
        self._metrics = metrics
        self._registry = registry
        self._clock = clock
        # Each returns what an operator should mend, or an empty text.
        self._troubles = troubles
        # Reason why the last heartbeat failed; empty if it succeeded.
        self.trouble = ""
        # The last decisions that were read; None before the first read.
        self._seen: deque[ScalingDecision] | None = None

    def traffic(self) -> Traffic:
        """Returns the current traffic of this process."""
        now, metrics = self._clock.now(), self._metrics
        ttft, itl = metrics.ttft.latencies(now), metrics.itl.latencies(now)
        return Traffic(self._load(ttft, itl, now), metrics.totals, ttft, itl)

    def _load(self, ttft: Latencies, itl: Latencies, now: float) -> RouterLoad:
        (ttft_p95,), (itl_p95,) = percentiles((ttft,), 95), percentiles((itl,), 95)
        dispatcher = self._driver.dispatcher
        for_prefill, prefill_tokens = dispatcher.waiting_for_prefill
        at_limit, limit_tokens = dispatcher.waiting_at_limit
        return RouterLoad(
            router_id=self._router_id,
            running=dispatcher.running,
            waiting=max(dispatcher.waiting, int(self._driver.is_wanted)),
            waiting_tokens=dispatcher.waiting_tokens,
            waiting_for_prefill=for_prefill,
            waiting_prefill_tokens=prefill_tokens,
            waiting_at_limit=at_limit,
            waiting_tokens_at_limit=limit_tokens,
            finished=self._metrics.finished,
            failed=self._metrics.failed,
            rss_bytes=_resident_bytes(),
            ttft_p95_ms=None if ttft_p95 is None else ttft_p95 * 1000,
            itl_p95_ms=None if itl_p95 is None else itl_p95 * 1000,
            certificate_note="; ".join(
                dict.fromkeys(note for one in self._troubles if (note := one()))
            ),
            protocol=VERSION,
            begun=dispatcher.recent.begun,
            recent=dispatcher.recent.sample(now),
        )

    async def run(self) -> None:
        """Publishes every HEARTBEAT_S seconds until cancelled, and at once when a request finds the
        decode pool empty. An unavailable registry is logged once.
        """
        while True:
            try:
                await self._registry.publish_router(self.traffic().load)
                self._metrics.desired = await self._registry.desired()
                self._metrics.standbys = await self._registry.standbys()
                self._count(await self._registry.decisions(DECISIONS))
                self.trouble = ""
            # Other errors than Unavailable are about one value, and must not end the router.
            except KvRelayError as error:
                if not self.trouble:
                    log.warning("heartbeat_failed", reason=error.message)
                self.trouble = error.message
            await asyncio.sleep(LEAST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S - LEAST_S):
                    await self._driver.knocked.wait()
            self._driver.knocked.clear()

    def _count(self, decisions: Sequence[ScalingDecision]) -> None:
        """Counts the decisions, newest first, that were not there before. Their times do not
        matter, since the clocks of controllers may be wrong.
        """
        if self._seen is None:
            # The first read finds decisions from before this router's start. They are not counted.
            self._seen = deque(reversed(decisions), _REMEMBERED)
        for decision in reversed(decisions):
            if decision not in self._seen:
                self._seen.append(decision)
                self._metrics.scaled(decision)

    async def end(self) -> None:
        """Removes the router's entry."""
        try:
            await self._registry.remove_router(self._router_id)
        except Unavailable:
            # The entry expires by itself.
            return


def _resident_bytes() -> int:
    return int(os.pread(_statm(), 200, 0).split()[1]) * _PAGE


@functools.cache
def _statm() -> int:
    """Returns a file descriptor that stays open: clients may take all other files of this process.
    The status is read until the process ends.
    """
    return os.open("/proc/self/statm", os.O_RDONLY)
