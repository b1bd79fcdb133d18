"""One fleet for all rows of a session: what a row kills is replaced before the next one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from faults.fleet import Fleet, running_fleet


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet() -> AsyncIterator[Fleet]:
    async with running_fleet() as running:
        yield running
        await running.complete()
        for worker in running.alive:
            sample = await worker.sample()
            assert sample.at_rest, sample
            assert not sample.integrity_error, sample
