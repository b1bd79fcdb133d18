"""Requests that killed their workers, kept from doing so again."""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from dataclasses import replace
from hashlib import blake2b

from kvrelay.errors import FailedPrecondition
from router.core.request import Request

QUARANTINE_S = 600.0
MOST = 1024  # remembered; the oldest is forgotten first


class Quarantine:
    """Knows them by a hash of tenant, prompt and sampling, and refuses their like for a while.

    The seed is left out of it: one that was drawn for the request differs each time. Each router
    has its own quarantine, so another router finds out by itself, at the price of its own two
    workers.
    """

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()  # in the order in which they end

    def __len__(self) -> int:
        return len(self._until)

    def add(self, request: Request, now: float) -> None:
        name = _name(request)
        self._until[name] = now + QUARANTINE_S
        self._until.move_to_end(name)
        if len(self._until) > MOST:
            self._until.popitem(last=False)

    def check(self, request: Request, now: float) -> None:
        """Raises FailedPrecondition for a request that is in quarantine."""
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        if not self._until:
            return
        until = self._until.get(_name(request))
        if until is not None:
            raise FailedPrecondition(
                "workers died computing this prompt with this sampling; it is in quarantine and "
                f"is not tried again for {math.ceil(until - now)} s; send another, and tell the "
                "operator of the router's log"
            )


def _name(request: Request) -> bytes:
    digest = blake2b(f"{request.tenant.name}\0".encode(), digest_size=16)
    digest.update(array("q", request.token_ids).tobytes())
    digest.update(repr(replace(request.sampling, seed=None)).encode())
    return digest.digest()
