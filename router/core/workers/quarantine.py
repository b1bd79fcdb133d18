"""Quarantine of poison requests."""

from __future__ import annotations

import json
import math
from array import array
from collections import OrderedDict
from dataclasses import replace
from hashlib import blake2b
from operator import itemgetter

from kvrelay.errors import FailedPrecondition
from router.core.request import Request

QUARANTINE_S = 600.0
# Limit on remembered requests. The oldest is forgotten first.
MOST = 1024


class Quarantine:
    """Rejects requests that are identical to a poison request, for QUARANTINE_S.

    A request is identified by a hash of tenant, adapter, prompt and sampling. The hash excludes the
    seed, because a generated seed differs each time. Each router has its own quarantine, so a
    poison request costs two workers per router. The processes of one router learn from each other.
    """

    def __init__(self) -> None:
        # In order of expiry.
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, request: Request, now: float) -> None:
        """Quarantines the request until `now` + QUARANTINE_S."""
        name = _name(request)
        self._until[name] = now + QUARANTINE_S
        self._until.move_to_end(name)
        if len(self._until) > MOST:
            self._until.popitem(last=False)

    def known(self, now: float) -> bytes:
        """Returns, for `learn`, what is in quarantine and until when, on the clock that the
        processes of this router have in common.
        """
        self._expire(now)
        return json.dumps({name.hex(): until for name, until in self._until.items()}).encode()

    def learn(self, known: bytes) -> None:
        """Adds what another process of this router has in quarantine. Raises ValueError, TypeError
        or AttributeError for what `known` has not written.
        """
        learnt = {bytes.fromhex(name): float(until) for name, until in json.loads(known).items()}
        self._until = OrderedDict(learnt | self._until)
        in_order = sorted(self._until.items(), key=itemgetter(1))
        self._until = OrderedDict(in_order[-MOST:])

    def check(self, request: Request, now: float) -> None:
        """Raises FailedPrecondition if the request is in quarantine."""
        self._expire(now)
        if not self._until:
            return
        until = self._until.get(_name(request))
        if until is not None:
            raise FailedPrecondition(
                "workers crashed on this prompt with these sampling parameters; it is in "
                f"quarantine and rejected for another {math.ceil(until - now)} s; change the "
                "request, and report it to the operator"
            )

    def _expire(self, now: float) -> None:
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)


def _name(request: Request) -> bytes:
    digest = blake2b(f"{request.tenant.name}\0{request.adapter}\0".encode(), digest_size=16)
    digest.update(array("q", request.token_ids).tobytes())
    digest.update(repr(replace(request.sampling, seed=None)).encode())
    return digest.digest()
