"""Rate limits per tenant and minute. Pure: time is an argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from kvrelay.errors import InvalidArgument, ResourceExhausted
from kvrelay.tenants import Tenant
from router.runtime.stream import Stream

_MINUTE_S = 60.0


class Bucket:
    """A token bucket that holds one minute's allowance, starts full, and refills evenly."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def take(self, amount: int, now: float) -> float:
        """Takes `amount` if it is available and returns 0; otherwise returns the seconds until it
        is. `amount` is at most `per_minute`.
        """
        wait_s = self._wait(amount, now)
        if wait_s == 0.0:
            self._level -= amount
        return wait_s

    def wait(self, amount: int, now: float) -> float:
        """Returns the seconds until `amount` is available, without taking it."""
        return self._wait(amount, now)

    def give_back(self, amount: int) -> None:
        """Returns an unused amount to the bucket, up to its capacity."""
        self._level = min(self._level + amount, self.per_minute)

    def resize(self, per_minute: int, now: float) -> None:
        """Changes the allowance. The used amount stays used."""
        self._refill(now)
        self._level = max(0.0, self._level + per_minute - self.per_minute)
        self.per_minute = per_minute

    def _wait(self, amount: int, now: float) -> float:
        self._refill(now)
        return max(0.0, amount - self._level) / self.per_minute * _MINUTE_S

    def _refill(self, now: float) -> None:
        # Of several processes, another one may have seen a later time.
        elapsed = max(0.0, now - self._at)
        self._level = min(self._level + elapsed * self.per_minute / _MINUTE_S, self.per_minute)
        self._at += elapsed


MakeBucket = Callable[[str, str, int, float], Bucket]


def _own_bucket(tenant: str, what: str, per_minute: int, now: float) -> Bucket:
    """Makes a bucket of this process alone."""
    return Bucket(per_minute, now)


class Limits:
    """Owns the buckets of this router's tenants. `bucket` makes the bucket of a tenant and limit.

    Admission takes the largest possible number of tokens for an answer, and the end of the request
    gives back the unused tokens. So the admitted requests never exceed the limit.
    """

    def __init__(self, bucket: MakeBucket = _own_bucket) -> None:
        self._bucket = bucket
        # By tenant and limit.
        self.refused: Counter[tuple[str, str]] = Counter()
        # By tenant and limit.
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def take_request(self, tenant: Tenant, now: float, choices: int = 1) -> None:
        """Takes one request per choice from the tenant's limit, since each choice costs as much as
        a request.

        Raises ResourceExhausted, or InvalidArgument for more choices than the limit of a minute,
        since waiting would not help.
        """
        if tenant.requests_per_minute is None:
            return
        if choices > tenant.requests_per_minute:
            raise InvalidArgument(
                f"n is {choices}; tenant {tenant.name} may send {tenant.requests_per_minute} "
                "requests per minute, and each choice counts as a request; reduce n",
                field="n",
            )
        bucket = self._of(tenant, "requests", tenant.requests_per_minute, now)
        self._take(bucket, choices, "requests", tenant, now)

    def check_request(self, tenant: Tenant, now: float) -> None:
        """Raises ResourceExhausted if `take_request` would. Takes nothing."""
        if tenant.requests_per_minute is not None:
            bucket = self._of(tenant, "requests", tenant.requests_per_minute, now)
            self._refuse(bucket, bucket.wait(1, now), "requests", tenant)

    def take_tokens(self, tenant: Tenant, amount: int, now: float) -> None:
        """Takes tokens from the tenant's limit. Raises ResourceExhausted, or InvalidArgument for
        more than the limit of a minute, since waiting would not help.
        """
        if tenant.tokens_per_minute is None:
            return
        if amount > tenant.tokens_per_minute:
            raise InvalidArgument(
                f"prompt and max_tokens are {amount} tokens together; tenant {tenant.name} may "
                f"use {tenant.tokens_per_minute} tokens per minute; shorten the prompt or "
                "reduce max_tokens",
                field="max_tokens",
            )
        bucket = self._of(tenant, "tokens", tenant.tokens_per_minute, now)
        self._take(bucket, amount, "tokens", tenant, now)

    def give_back(self, tenant: Tenant, amount: int) -> None:
        """Returns tokens that were taken and not used."""
        if (bucket := self._buckets.get((tenant.name, "tokens"))) is not None:
            bucket.give_back(amount)

    def ended(self, stream: Stream) -> None:
        """Gives back the unused tokens of a request that has ended. An observer of requests calls
        it.
        """
        self.give_back(
            stream.request.tenant, stream.request.sampling.max_tokens - stream.num_tokens
        )

    def keep(self, names: Iterable[str]) -> None:
        """Forgets all other tenants."""
        kept = set(names)
        for key in [one for one in self._buckets if one[0] not in kept]:
            del self._buckets[key]
        for key in [one for one in self.refused if one[0] not in kept]:
            del self.refused[key]

    def _of(self, tenant: Tenant, what: str, per_minute: int, now: float) -> Bucket:
        key = (tenant.name, what)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = self._bucket(*key, per_minute, now)
        elif bucket.per_minute != per_minute:
            bucket.resize(per_minute, now)
        return bucket

    def _take(self, bucket: Bucket, amount: int, what: str, tenant: Tenant, now: float) -> None:
        self._refuse(bucket, bucket.take(amount, now), what, tenant)

    def _refuse(self, bucket: Bucket, wait_s: float, what: str, tenant: Tenant) -> None:
        if wait_s > 0:
            self.refused[tenant.name, what] += 1
            raise ResourceExhausted(
                f"tenant {tenant.name} has used its limit of {bucket.per_minute} {what} per "
                "minute; retry later",
                retry_after_s=wait_s,
            )
