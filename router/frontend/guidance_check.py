"""The check of guidance before a request is admitted, off the event loop and fair to tenants."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from kvrelay.engine.sampling.grammar import COMPILER
from kvrelay.engine.sampling.grammar_trial import GrammarTrial
from kvrelay.errors import InvalidArgument
from kvrelay.tenants import Tenant
from kvrelay.types.requests import Guidance, SamplingParams
from router.frontend.model_card import ModelCard
from router.runtime.fair_threads import FairThreads

T = TypeVar("T")
# Results that are kept. Each takes some hundred bytes.
MAX_KNOWN = 4096


def tried(sampling: SamplingParams) -> SamplingParams:
    """Marks guidance that has passed the check. Workers with the same compiler do not try it out
    again.
    """
    if sampling.guidance is None:
        return sampling
    return replace(sampling, guidance=replace(sampling.guidance, tried_with=COMPILER))


class GuidanceCheck:
    """Tries out guidance in a child process, one at a time in the fair order of the tenants.

    Guidance that was checked lately has its result at once.
    """

    def __init__(self, card: ModelCard) -> None:
        self._trial = GrammarTrial(card.folder, card.vocab_size, card.eos_token_ids)
        self._threads = FairThreads(1, 0, "guidance")
        # Digest -> why the guidance is not accepted, or empty. The last used last.
        self._known: OrderedDict[bytes, str] = OrderedDict()

    async def warm_up(self) -> None:
        """Starts the child process, so that no request waits for that."""
        await asyncio.to_thread(self._trial.warm_up)

    async def check(self, guidance: Guidance, tenant: Tenant, salt: str) -> None:
        """Raises InvalidArgument with llguidance's reason if the model cannot follow the guidance,
        and Unavailable if the process does not run.

        salt: of the request's prefix cache. A result is known only to requests with the same salt,
        because the time would tell one tenant whether another uses a schema.
        """
        asked = f"{len(salt)} {salt} {guidance.kind} {guidance.source}"
        key = hashlib.sha256(asked.encode()).digest()
        reason = self._known.get(key)
        if reason is None:
            cost = len(guidance.source)
            reason = await self._threads.run(tenant, cost, lambda: self._reason(key, guidance))
        self._known[key] = reason
        self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        if reason:
            raise InvalidArgument(reason, field="guidance")

    async def run(self, tenant: Tenant, cost: int, work: Callable[[], T]) -> T:
        """Runs other work on grammars in the same thread and order. Returns its result or raises
        its error.

        cost: characters of the grammars.
        """
        return await self._threads.run(tenant, cost, work)

    async def close(self) -> None:
        """Ends the process and the thread."""
        self._threads.close()
        await asyncio.to_thread(self._trial.close)

    def _reason(self, key: bytes, guidance: Guidance) -> str:
        """Returns why the guidance is not accepted, or nothing. Runs in the thread."""
        # A request that waited before this one may have had the same guidance.
        if (reason := self._known.get(key)) is not None:
            return reason
        try:
            self._trial.check(guidance)
            reason = ""
        except InvalidArgument as error:
            reason = error.message
        self._known[key] = reason
        return reason
