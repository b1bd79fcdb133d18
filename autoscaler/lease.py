"""The controllers' lease: at most one controller scales the pools and starts workers, even if Redis
loses data.

Redis arbitrates, but Redis may lose its last writes or all of them, and then forgets the leader. So
no controller trusts a single record:
- A leader stops DEADLINE_S after the start of its last successful renewal, by its own monotonic
  clock.
- A controller that takes the lease does not act for TAKEOVER_S. In that time each renewal has to
  find the lease as the controller left it; otherwise the wait starts again. TAKEOVER_S is longer
  than DEADLINE_S. A leader whose record Redis has lost has stopped by then, or has renewed its
  lease and so restarted the new controller's wait.
- No controller compares clocks of two hosts. A controller treats another's lease as ended when it
  has polled for EXPIRY_S and the record has not changed. Clocks may run at different rates, up to
  TAKEOVER_S / DEADLINE_S.
- A new term exceeds each term that Redis, the new leader or any live worker knows. Terms fence the
  parts that cannot check a clock: writes to Redis, and workers that start late.
- A leader that has stopped leads again only under a later term. Redis may have lost everything that
  another leader wrote in between. Redis then has the first leader's record again, and accepts
  claims of the first leader's term.

Sources: the fencing token is from Martin Kleppmann, "How to do distributed locking" (2016). The
leader election of client-go also judges a lease by its observed changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrelay.clock import Clock, MonotonicClock
from kvrelay.errors import Unavailable
from kvrelay.process.telemetry import get_logger
from kvrelay.state.registry import Registry
from kvrelay.types.control_plane import Claim, ControllerInfo, ControllerState, LeaseRecord

RENEW_S = 0.5
DEADLINE_S = 5.0
EXPIRY_S = 5.0
TAKEOVER_S = 8.0

log = get_logger("lease")


class Lease:
    """One controller's view of the lease.

    - owner: names one incarnation of one process and is never reused.
    - sole: no other controller can reach this Redis, so the controller does not wait for others.
    """

    def __init__(
        self, registry: Registry, owner: str, clock: Clock | None = None, *, sole: bool = False
    ) -> None:
        self.owner = owner
        self._registry = registry
        self._clock = clock or MonotonicClock()
        self._sole = sole
        # Record of the last renewal. The owner is empty while another controller has the lease.
        self._mine = LeaseRecord()
        # Since this time, all renewals have found the lease as it was left.
        self._held_since = 0.0
        # Start of the last successful renewal.
        self._renewed_at = 0.0
        # True once the takeover wait is over.
        self._acts = False
        self._seen_term = 0
        # Last seen record of another controller.
        self._others = LeaseRecord()
        self._others_since = 0.0
        self._polled_at = float("-inf")

    @property
    def leads(self) -> bool:
        """Whether this controller may act now."""
        return self._acts and self._seconds_left() > 0

    @property
    def succeeded(self) -> bool:
        """Whether another controller has the lease, by the last answer of Redis."""
        return bool(self._others.owner)

    @property
    def adopts(self) -> bool:
        """Whether other controllers may have started workers. The leader counts these workers as
        its own.
        """
        return not self._sole

    @property
    def name_tag(self) -> str:
        """Suffix that makes the names of this controller's workers unique. Empty if Redis and the
        controller remember the names.
        """
        return "" if self._sole else self.owner.rpartition("-")[2]

    @property
    def state(self) -> ControllerState:
        """State to publish: leading, claiming (holds the lease but may not act yet), or standby."""
        if self.leads:
            return "leading"
        return "claiming" if self._mine.owner else "standby"

    def claim(self) -> Claim:
        """Returns the claim that fences a write. Raises Unavailable while this controller does not
        lead.
        """
        if not self.leads:
            raise Unavailable(f"controller {self.owner} is not the leader")
        return Claim(self.owner, self._mine.term)

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Cancels the body when the lease ends. Raises Unavailable in that case, and on entry while
        this controller does not lead.
        """
        self.claim()
        try:
            async with asyncio.timeout(self._seconds_left()):
                yield
        except TimeoutError:
            raise Unavailable(f"the lease of controller {self.owner} expired") from None

    async def run(self) -> None:
        """Renews the lease until cancelled, then releases it."""
        answered = True
        try:
            while True:
                try:
                    await self.renew()
                    await self._registry.publish_controller(
                        ControllerInfo(self.owner, self.state, self._mine.term)
                    )
                    answered = True
                except Unavailable as error:
                    if answered:
                        log.warning("lease_not_renewed", owner=self.owner, reason=error.message)
                    answered = False
                await asyncio.sleep(RENEW_S)
        finally:
            await self.release()

    async def renew(self) -> None:
        """Renews the lease, or takes it if it is free or has ended. Raises Unavailable."""
        led, began = self.leads, self._clock.now()
        if self._acts and not led:
            self._step_down()
        # A record counts as unchanged only if this controller polled all the time.
        if began - self._polled_at > DEADLINE_S:
            self._others_since = began
        expired = self._sole or began - self._others_since >= EXPIRY_S
        takes = self._others if expired else LeaseRecord()
        record = await self._registry.renew_lease(self.owner, self._seen_term, takes)
        if self._sole and record.owner != self.owner:
            record = await self._registry.renew_lease(self.owner, record.term, record)
        self._polled_at = began
        self._seen_term = max(self._seen_term, record.term)
        if record.owner == self.owner:
            self._keep(record, led, began)
        else:
            self._stand_by(record, led)

    def _step_down(self) -> None:
        """Ends the leadership, so that the next renewal gets a later term. Claims of the old term
        must not hold in the next one, even if Redis has forgotten the leaders in between.
        """
        self._mine, self._acts = LeaseRecord(), False
        self._seen_term += 1

    def _keep(self, record: LeaseRecord, led: bool, began: float) -> None:
        expected = LeaseRecord(self.owner, self._mine.term, self._mine.beat + 1)
        unbroken = record == expected and began - self._renewed_at < DEADLINE_S
        if record != expected and self._mine.owner:
            log.warning(
                "lease_lost_by_redis",
                owner=self.owner,
                term=record.term,
                expected_term=self._mine.term,
            )
        if not self._mine.owner:
            log.info(
                "lease_taken",
                owner=self.owner,
                term=record.term,
                acts_in_s=0.0 if self._sole else TAKEOVER_S,
            )
        if not led and not unbroken:
            # The claim was in Redis at this moment at the latest.
            self._held_since = self._clock.now()
        self._mine, self._renewed_at = record, began
        self._others = LeaseRecord()
        if not self._acts and (self._sole or began - self._held_since >= TAKEOVER_S):
            self._acts = True
            log.info("controller_leads", owner=self.owner, term=record.term)

    def _stand_by(self, record: LeaseRecord, led: bool) -> None:
        if self._mine.owner or not self._others.owner:
            log.warning(
                "controller_deposed" if led else "controller_stands_by",
                owner=self.owner,
                leader=record.owner,
            )
        self._mine = LeaseRecord()
        if self._acts:
            self._step_down()
        if record != self._others:
            self._others, self._others_since = record, self._clock.now()

    async def release(self) -> None:
        """Gives the lease back, so that other controllers do not wait for its expiry."""
        self._acts = False
        self._mine = LeaseRecord()
        try:
            await self._registry.release_lease(self.owner)
            await self._registry.remove_controller(self.owner)
        except Unavailable as error:
            log.warning("lease_kept_until_it_expires", owner=self.owner, reason=error.message)

    def _seconds_left(self) -> float:
        return self._renewed_at + DEADLINE_S - self._clock.now()
