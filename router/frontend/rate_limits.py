"""How much each tenant may ask for in a minute. Pure: time is an argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvrelay.errors import InvalidArgument, ResourceExhausted
from kvrelay.tenants import Tenant
from router.runtime.stream import Stream

_MINUTE_S = 60.0


class Bucket:
    """A token bucket: it holds what a minute allows, is full at first, and fills evenly."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def take(self, amount: int, now: float) -> float:
        """Seconds until there is enough; 0 if there was, and it is taken. `amount` is at most
        `per_minute`.
        """
        wait_s = self.wait(amount, now)
        if wait_s == 0.0:
            self._level -= amount
        return wait_s

    def wait(self, amount: int, now: float) -> float:
        """As `take`, which takes nothing."""
        self._refill(now)
        return max(0.0, amount - self._level) / self.per_minute * _MINUTE_S

    def give_back(self, amount: int) -> None:
        self._level = min(self._level + amount, self.per_minute)

    def resize(self, per_minute: int, now: float) -> None:
        """What was used up stays used up."""
        self._refill(now)
        self._level = max(0.0, self._level + per_minute - self.per_minute)
        self.per_minute = per_minute

    def _refill(self, now: float) -> None:
        self._level = min(
            self._level + (now - self._at) * self.per_minute / _MINUTE_S, self.per_minute
        )
        self._at = now


class Limits:
    """Owns the buckets of this router's tenants.

    An answer takes as many tokens as it could have when its request is admitted, and what it did
    not use is given back at its end: so what was admitted is never over the limit, whatever is
    under way.
    """

    def __init__(self) -> None:
        self.refused: Counter[tuple[str, str]] = Counter()  # by tenant and limit
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}

    def take_request(self, tenant: Tenant, now: float, choices: int = 1) -> None:
        """Each choice counts as a request, since it costs what one does.

        Raises ResourceExhausted, and InvalidArgument for more than a minute allows: waiting would
        not help.
        """
        if tenant.requests_per_minute is None:
            return
        if choices > tenant.requests_per_minute:
            raise InvalidArgument(
                f"n is {choices}; tenant {tenant.name} may send {tenant.requests_per_minute} "
                "requests in a minute, and each choice counts as one, so ask for fewer",
                field="n",
            )
        bucket = _bucket(self._requests, tenant.name, tenant.requests_per_minute, now)
        self._take(bucket, choices, "requests", tenant, now)

    def check_request(self, tenant: Tenant, now: float) -> None:
        """Raises ResourceExhausted where `take_request` would, and takes nothing."""
        if tenant.requests_per_minute is not None:
            bucket = _bucket(self._requests, tenant.name, tenant.requests_per_minute, now)
            self._refuse(bucket, bucket.wait(1, now), "requests", tenant)

    def take_tokens(self, tenant: Tenant, amount: int, now: float) -> None:
        """Raises ResourceExhausted, and InvalidArgument for more than a minute allows: waiting
        would not help.
        """
        if tenant.tokens_per_minute is None:
            return
        if amount > tenant.tokens_per_minute:
            raise InvalidArgument(
                f"prompt and max_tokens are {amount} tokens together; tenant {tenant.name} may use "
                f"{tenant.tokens_per_minute} in a minute, so ask for fewer",
                field="max_tokens",
            )
        bucket = _bucket(self._tokens, tenant.name, tenant.tokens_per_minute, now)
        self._take(bucket, amount, "tokens", tenant, now)

    def give_back(self, tenant: Tenant, amount: int) -> None:
        """Tokens that were taken and not used."""
        if tenant.name in self._tokens:
            self._tokens[tenant.name].give_back(amount)

    def ended(self, stream: Stream) -> None:
        """As an observer of requests: the end of one that was admitted."""
        self.give_back(
            stream.request.tenant, stream.request.sampling.max_tokens - stream.num_tokens
        )

    def keep(self, names: Iterable[str]) -> None:
        """Forgets all other tenants."""
        kept = set(names)
        for buckets in (self._requests, self._tokens):
            for gone in buckets.keys() - kept:
                del buckets[gone]
        for key in [one for one in self.refused if one[0] not in kept]:
            del self.refused[key]

    def _take(self, bucket: Bucket, amount: int, what: str, tenant: Tenant, now: float) -> None:
        self._refuse(bucket, bucket.take(amount, now), what, tenant)

    def _refuse(self, bucket: Bucket, wait_s: float, what: str, tenant: Tenant) -> None:
        if wait_s > 0:
            self.refused[tenant.name, what] += 1
            raise ResourceExhausted(
                f"tenant {tenant.name} has used up its {bucket.per_minute} {what} a minute",
                retry_after_s=wait_s,
            )


def _bucket(buckets: dict[str, Bucket], name: str, per_minute: int, now: float) -> Bucket:
    bucket = buckets.get(name)
    if bucket is None:
        bucket = buckets[name] = Bucket(per_minute, now)
    elif bucket.per_minute != per_minute:
        bucket.resize(per_minute, now)
    return bucket
